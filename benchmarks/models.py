"""What is measured: small models, and copies of them that share no compiled code."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def add_one(x: Tensor) -> Tensor:
    """One kernel."""
    return x + 1


class Mlp(nn.Module):
    """``num_layers`` x (Linear + GELU)."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = functional.gelu(linear(x))
        return x


class Block(nn.Module):
    """Attention and MLP, normed before."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """A stack of blocks."""

    def __init__(self, num_layers: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def fresh(target: Callable[..., Any]) -> Any:
    """A copy of a function or module with a code object of its own.

    Dynamo keeps compiled code by code object: without this, every call of one side would also
    walk the guards of the others.
    """
    if isinstance(target, nn.Module):
        module = copy.deepcopy(target)
        kind = type(target)
        module.__class__ = type(kind.__name__, (kind,), {"forward": _fresh_function(kind.forward)})
        return module
    return _fresh_function(target)


def _fresh_function(function: Any) -> types.FunctionType:
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def assert_close(actual: Tensor, expected: Tensor, who: str) -> None:
    """Raise unless ``actual`` is ``expected`` but for rounding; TF32 products are near 1e-3."""
    error = ((actual - expected).norm() / expected.norm()).item()
    if not error < 1e-2:  # NaN is an error, too
        raise AssertionError(f"{who} gives other values than eager: relative error {error:.1e}, expected < 1e-2")


def compile_side(side: str, target: Callable[..., Any], device: str) -> Any:
    """``target`` as compiled by one of the sides: "graphcap", "reduce-overhead", "compile"."""
    if side == "graphcap":
        from graphcap_backend.backend import graphcap

        return torch.compile(target, backend=graphcap, options={} if device == "cuda" else {"host_capture": True})
    if side == "reduce-overhead":
        return torch.compile(target, mode="reduce-overhead")
    if side == "compile":
        return torch.compile(target)
    raise ValueError(f"no side {side!r}; expected graphcap, reduce-overhead or compile")
