"""What all benchmarks of one run share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to measure."""

    device: str = "cuda"
    """"cpu" runs every code path without a GPU, on HostGraphs; its numbers mean nothing."""
    quick: bool = False
    """A few rounds only: to see that all works."""
    peer: str | None = None
    """Path of torch 2.15's ``torch/cuda/_graph_node_callbacks.py``."""

    @property
    def on_cuda(self) -> bool:
        """Whether this run measures a GPU."""
        return self.device == "cuda"

    @property
    def rounds(self) -> int:
        """How often every side gets its turn."""
        return 5 if self.quick else 40

    @property
    def seconds(self) -> float:
        """After so long a row has enough rounds."""
        return 1.0 if self.quick else 3.0

    def scaled(self, number: int) -> int:
        """Size of a workload: ``number`` on CUDA, a tenth of it where only the code path counts."""
        return number if self.on_cuda else max(1, number // 10)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.on_cuda:
            import torch

            torch.cuda.synchronize()

    def new_graph(self) -> Any:
        """An empty graph to capture into."""
        if self.on_cuda:
            import torch

            return torch.cuda.CUDAGraph()
        from graphcap_backend import HostGraph

        return HostGraph()
