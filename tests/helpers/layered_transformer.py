"""A transformer of twelve layers, and what is known of each piece of it from its text alone.

All layers share the lines of ``Block``; what tells them apart is the line of ``Transformer.forward`` that calls
each. Every layer has a scope of its own, and in it one for attention and one for the MLP, once somebody has put
graphcap's ``mark_kernels`` in the place of ``mark``: the module itself imports nothing of graphcap.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_LAYERS = 12
WIDTH = 64
NUM_HEADS = 4
NUM_TOKENS = 16

Scope = tuple[int, str]
"""A layer's number, and "attention" or "mlp"."""


def no_scope(_annotation: str | dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


mark: Callable[[str | dict[str, Any]], contextlib.AbstractContextManager[None]] = no_scope


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
        self.scales = nn.Parameter(torch.ones(2, WIDTH))
        self.kept: Tensor | None = None
        """Where to keep the last input, if anywhere: a fill and a copy."""

    def attend(self, x: Tensor) -> Tensor:
        with mark("attention"):
            if self.kept is not None:
                self.kept.zero_()
                self.kept.copy_(x.detach())
            return x + self.attention(self.norm1(x))

    def think(self, x: Tensor) -> Tensor:
        with mark("mlp"):
            hidden = functional.gelu(self.up(self.norm2(x)))
            scale = self.scales[0]  # whose backward is a fill and a copy
            return x + scale * self.down(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.think(self.attend(x))


class Transformer(nn.Module):
    """Tokens of width ``WIDTH`` in, the same shape out."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(NUM_TOKENS, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def layer(self, number: int, x: Tensor) -> Tensor:
        with mark({"layer": number}):
            out: Tensor = self.blocks[number](x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        x = self.layer(0, x)
        x = self.layer(1, x)
        x = self.layer(2, x)
        x = self.layer(3, x)
        x = self.layer(4, x)
        x = self.layer(5, x)
        x = self.layer(6, x)
        x = self.layer(7, x)
        x = self.layer(8, x)
        x = self.layer(9, x)
        x = self.layer(10, x)
        x = self.layer(11, x)
        normalized: Tensor = self.norm(x)
        return normalized


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(x))
        out: Tensor = torch.tanh(self.second(hidden))
        return out


def batch(device: str, number: int) -> Tensor:
    """The input of call ``number``."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, NUM_TOKENS, WIDTH, generator=generator).to(device)


# What the text says -------------------------------------------------------------------------------------------

FILE = Block.forward.__code__.co_filename
TEXT = dict(enumerate(Path(FILE).read_text(encoding="utf-8").splitlines(), 1))

_CALL = re.compile(r"x = self\.layer\((\d+), x\)")
_PARTS = {"attention": (Attention.forward, Block.attend), "mlp": (Block.think,)}
_MODULE_PARTS = {"attention": "attention", "norm1": "attention", "norm2": "mlp", "up": "mlp", "down": "mlp",
                 "scales": "mlp"}  # fmt: skip

LAYER_OF_LINE = {line: int(found[1]) for line, text in TEXT.items() if (found := _CALL.search(text))}
"""Lines of ``Transformer.forward`` that call a layer."""


def _lines_of(function: Callable[..., Any]) -> set[int]:
    return {line for _, _, line in function.__code__.co_lines() if line is not None}


PART_OF_LINE = {
    line: part
    for part, functions in _PARTS.items()
    for function in functions
    for line in _lines_of(function) - {function.__code__.co_firstlineno}
}
"""Lines that do the work of one part of a layer."""


def lines(frames: Iterable[str]) -> list[int]:
    """Lines of this file among "file:line:function" texts."""
    found = (frame.rsplit(":", 2) for frame in frames)
    return [int(parts[1]) for parts in found if parts[0] == FILE]


def layers_of(frames: Iterable[str]) -> set[int]:
    """Layers whose calls are on a call path."""
    return {LAYER_OF_LINE[line] for line in lines(frames) if line in LAYER_OF_LINE}


def layers_of_modules(modules: Iterable[str]) -> set[int]:
    return {int(path.split(".")[1]) for path in modules if path.startswith("blocks.")}


def owner(path: str) -> Scope | None:
    """Layer and part of a module or parameter ("blocks.3.attention.qkv.weight"), where its path tells both."""
    pieces = path.split(".")
    if len(pieces) < 3 or pieces[0] != "blocks" or pieces[2] not in _MODULE_PARTS:
        return None
    return int(pieces[1]), _MODULE_PARTS[pieces[2]]
