"""Compile a model with the graphcap backend, and ask what was captured.

The concept: the first call at a shape runs uncaptured, the second is captured and replayed, later
ones replay. Results are the caller's to keep: no call overwrites what an earlier one returned.
On a machine without CUDA the option ``host_capture`` captures into a HostGraph instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphcap_backend import capture_nodes, report


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(x))
        out: Tensor = self.down(hidden)
        return x + out


@torch.no_grad()
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Mlp().to(device).eval()
    compiled = torch.compile(model, backend="graphcap", options={"host_capture": device == "cpu"})

    inputs = [torch.randn(8, 32, device=device) for _ in range(5)]
    results = [compiled(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-4)

    summary = report(compiled)
    print(summary)
    assert len(summary.graphs) >= 1
    for node in capture_nodes(summary.graphs[0]):
        print(node.index, node.name, *node.sources, sep="\n    ")
        assert any("01_compile.py" in line for line in node.sources), "each kernel names the model's lines"


if __name__ == "__main__":
    main()
