"""Measure which line of the model the time of replays goes to.

The concept: ``profile_replays`` makes real calls and measures each node: on a GPU from CUPTI's activity
records, on a ``HostGraph`` by timing each launch. Sums by line, scope, module and kernel count nothing twice: a kernel
fused from several lines gives each an equal part, which is also told as shared.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphcap_backend import profile_replays


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cheap = nn.Linear(8, 8)
        self.wide = nn.Linear(256, 4096)

    def forward(self, x: Tensor) -> Tensor:
        small: Tensor = self.cheap(x[:, :8])
        large: Tensor = self.wide(x)
        return functional.gelu(large).sum(dim=1) + small.sum(dim=1)


@torch.no_grad()
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    model = Wide().to(device).eval()
    compiled = torch.compile(model, backend="graphcap", options={"host_capture": device == "cpu"})
    profile = profile_replays(compiled, torch.randn(256, 256, device=device), num_replays=10)
    print(profile)

    assert profile.num_calls == 10
    for shares in (profile.by_line(), profile.by_module(), profile.by_kernel()):
        assert sum(share.weight for share in shares) == profile.nodes_ns, "nothing is lost, nothing counted twice"
    heaviest = profile.by_line()[0]
    assert "06_profile_by_line.py" in heaviest.label


if __name__ == "__main__":
    main()
