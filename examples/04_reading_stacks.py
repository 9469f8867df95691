"""Ask a fused kernel which lines, which modules and which call path it comes from.

The concept: a node of a compiled function has ``sources`` (every line of the model that was fused into its
kernel), ``modules`` (the module paths those lines ran in) and ``stack`` (innermost first, the user's frames only).
A scope opened with ``mark_kernels`` in traced code labels the kernels of that code, and their backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphcap_backend import capture_nodes, mark_kernels, report


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        with mark_kernels("gate"):
            hidden = functional.gelu(self.up(x))
            scaled = hidden * torch.sigmoid(hidden)
        out: Tensor = self.down(scaled)
        return x + out


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(Gate(), Gate()).to(device)
    compiled = torch.compile(model, backend="graphcap", options={"host_capture": device == "cpu"})
    with torch.no_grad():
        for _ in range(2):
            compiled(torch.ones(4, 16, device=device))

    nodes = capture_nodes(report(compiled).graphs[0])
    print(nodes.render(stacks=True, modules=True, shapes=False))

    fused = next(node for node in nodes if "gelu" in node.name)
    assert len(fused.sources) == 2, "the lines of the gelu and of the sigmoid are one kernel"
    assert fused.annotation == {"name": "gate"}
    assert fused.stack is not None
    innermost, *outer = fused.stack.splitlines()
    assert innermost.endswith(":forward")
    assert outer[-1].endswith(":<module>"), "down to the line of this script that made the call"


if __name__ == "__main__":
    main()
