"""Write one HTML page of all that is known: for a colleague, a pull request, a build's artefacts.

The concept: ``report(compiled).to_html(path)``, or ``write_page`` for a graph captured by hand, a profile or a
saved capture. The page loads nothing from anywhere. It tells what was captured and what was not and why, shares by
line with the source beside, every node, and the graph drawn.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphcap_backend import mark_kernels, profile_replays, report


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        with mark_kernels("mlp"):
            hidden = functional.gelu(self.up(self.norm(x)))
            out: Tensor = self.down(hidden)
        return x + out


@torch.no_grad()
def main(path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block() for _ in range(3))).to(device).eval()
    compiled = torch.compile(model, backend="graphcap", options={"host_capture": device == "cpu"})
    profile = profile_replays(compiled, torch.randn(32, 64, device=device))
    report(compiled).to_html(path, profile)

    html = path.read_text(encoding="utf-8")
    print(f"{path.name}: {len(html) // 1000} kB")
    assert "Captured: 1 of 1 compiled part" in html
    assert "functional.gelu(self.up(self.norm(x)))" in html, "the source is in the page"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder, "page.html"))
