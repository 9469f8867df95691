"""The demo: a small transformer compiled with the backend, checked against eager and explained.

It captures on CUDA if there is a device, else into a HostGraph through the same code path.
"""

from __future__ import annotations

import linecache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from graphcap_backend import NodeList

WIDTH = 64
NUM_HEADS = 4
NUM_TOKENS = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, 3, NUM_HEADS, width // NUM_HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = functional.gelu(self.up(self.norm2(x)))
        out: Tensor = x + self.down(hidden)
        return out


class Transformer(nn.Module):
    """Tokens of width ``WIDTH`` in, the same shape out."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        normalized: Tensor = self.norm(x)
        return normalized


@torch.no_grad()
def run_demo(*, num_layers: int, num_calls: int, num_nodes: int, save: str | None = None) -> None:
    """Compile, call, check every call against eager, print the report and the first nodes.

    ``save`` names a file for the capture, with its times.

    Raises:
        AssertionError: a call's result differs from eager's.
    """
    from graphcap_backend import GraphcapError, capture_nodes, profile_replays, report, save_capture

    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if on_cuda else "cpu")
    where = torch.cuda.get_device_name() if on_cuda else "the CPU: no CUDA device here, so capture goes to a HostGraph"
    print(f"torch {torch.__version__} on {where}")

    torch.manual_seed(0)
    model = Transformer(num_layers).to(device).eval()
    compiled = torch.compile(model, backend="graphcap", options={} if on_cuda else {"host_capture": True})
    for call in range(1, num_calls + 1):
        x = torch.randn(2, NUM_TOKENS, WIDTH, device=device)
        actual, expected = compiled(x), model(x)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        print(f"call {call}: equal to eager (largest difference {(actual - expected).abs().max().item():.0e})")

    summary = report(compiled)
    print(f"\n{summary}\n")
    if not summary.graphs:
        raise GraphcapError(f"expected a captured graph after {num_calls} calls, found none: the report above says why")
    _print_nodes(capture_nodes(summary.graphs[0]), num_nodes)
    if save is not None:
        save_capture(save, profile_replays(compiled, x))
        print(f"\nMeasured and saved. See where the time goes: python -m graphcap_backend report {save}")


def _print_nodes(nodes: NodeList, num_nodes: int) -> None:
    print(f"First {min(num_nodes, len(nodes))} of {len(nodes)} nodes, each with the model's lines behind it:")
    for node in nodes[:num_nodes]:
        print(f"{node.index:4d} {node.kind} {node.name}")
        for location in node.sources or (node.stack or "").splitlines()[:1]:
            print(f"         {_quoted(location)}")


def _quoted(location: str) -> str:
    """Turn "dir/demo.py:43:forward" into "demo.py:43 in forward: the text of that line"."""
    path, line, function = location.rsplit(":", 2)
    text = linecache.getline(path, int(line)).strip()
    return f"{path.rsplit('/', 1)[-1]}:{line} in {function}: {text}"
