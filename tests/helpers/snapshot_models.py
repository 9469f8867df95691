"""Models whose captures are pinned as text. Their line numbers are part of the snapshots."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional


class TwoLayers(nn.Module):
    """The same code in two layers: their kernels are told apart by call site, not by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(x))
        out = functional.gelu(self.second(hidden))
        return out * 2


def make_model(device: str) -> tuple[TwoLayers, Tensor]:
    """A model and an input for it, the same numbers each time."""
    torch.manual_seed(0)
    return TwoLayers().to(device).eval(), torch.randn(4, 16, device=device)


@torch.no_grad()
def eager_host_text() -> str:
    """What an eager run of the model records on a HostGraph."""
    from graphcap_backend import HostGraph, capture_nodes, graph, mark_kernels

    model, x = make_model("cpu")
    g = HostGraph()
    with graph(g, enable_annotations=True, annotation_config={"record_py_stacks": True}):
        with mark_kernels("warm"):
            y = model(x)
        y.add_(1)
    return capture_nodes(g).render()


@torch.no_grad()
def compiled_text(device: str) -> str:
    """What the compile backend captures of the model."""
    from graphcap_backend import capture_nodes, report

    model, x = make_model(device)
    options = {"host_capture": True} if device == "cpu" else {}
    compiled = torch.compile(model, backend="graphcap", options=options)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    g = report(compiled).graphs[0]
    return capture_nodes(g).render()


if __name__ == "__main__":
    sys.stdout.write(eager_host_text() + compiled_text("cpu"))
