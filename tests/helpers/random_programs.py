"""Random modules, each a few lines of Python: what a differential test runs in eager and through the backend.

A program is made from a seed. Its ``source`` is plain code on a growing list of tensors of shape (rows, 4):
arithmetic, views, writes in place, state, dropout. Plain code is quick to trace, and a failure can print it.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

WIDTH = 4

STEPS = {
    "add": "{z} = {a} + {b}",
    "product": "{z} = torch.tanh({a} * {b})",
    "difference": "{z} = ({a} - {b}) * 0.5",
    "linear": "{z} = torch.tanh({a} @ self.weight + self.bias)",
    "shared": "{z} = torch.sin({b} @ self.weight.t())",
    "attended": "{z} = torch.softmax({a} @ {b}.t(), 1) @ {b}",
    "relu": "{z} = torch.relu({a}) - 0.1",
    "softmax": "{z} = torch.softmax({a}, 1)",
    "where": "{z} = torch.where({a} > 0, {a}, {b})",
    "counted": "{z} = {a} * 0.5 ** ({b} > 0).sum(0)",
    "total": "{z} = {a}.sum(0, keepdim=True) * 0.1 + {b}",
    "sized": "{z} = {a} / {a}.shape[0]",
    "rows": "{z} = {a}.flip(0)",
    "selected": "{z} = {a}.index_select(0, torch.arange({a}.shape[0], device={a}.device).flip(0))",
    "expanded": "{z} = {b}[:, :1].expand_as({a})",
    "swapped": "{z} = torch.cat({a}.chunk(2, 1)[::-1], 1)",
    "transposed": "{z} = {a}.t().contiguous().t()",
    "reshaped": "{z} = {a}.reshape(-1).view({a}.shape)",
    "alias": "{z} = {a}[:]",
    "dropout": "{z} = nn.functional.dropout({a}, 0.25, self.training)",
    "noise": "{z} = {a} + torch.rand_like({b})",
    "in_place": "{z} = {a} * 0.5\n{z} += {b}\n{z}.tanh_()",
    "write_a_clone": "{z} = {a}.clone()\n{z}[:, 1:].mul_(0.5)\n{z}.t()[0].add_({b}[:, 0])",
    "write_through_a_view": "{z} = {a}.new_zeros({a}.shape)\n{z}.view(-1)[1:].add_(0.5)\n{z}[::2].copy_({b}[::2])",
    "state": "self.seen.mul_(0.5).add_({a}.detach().mean(0))\nself.calls += 1\n{z} = {b} + self.seen",
    "remember": "{z} = {b} + self.last\nself.last = {a}.detach().mean(0)",
}
"""Lines that make a tensor {z} of earlier ones, {a} and {b}."""

OUTPUTS = {
    "plain": "{v}",
    "row": "{v}[1:]",
    "transposed": "{v}.t()",
    "detached": "{v}.detach() * 2",
    "moved": "{v} + 0.125",
    "nested": "({v}, [{v} * 2, None])",
    "named": "{{'half': {v}[:, :2]}}",
    "count": "({v} > 0).sum()",
    "size": "{v}.shape[0]",
    "buffer": "self.seen",
}

WRITES = {
    "nothing": "",
    "y": "y.mul_(0.5).add_(0.25)",
    "rows of y": "y[1:].add_(0.5)",
    "column of x": "x.t()[0].mul_(0.5)",
    "x": "x.copy_(y.flip(0))",
}
"""What a program does to its inputs first."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One of ``STEPS`` on two earlier tensors, by number: 0 is x, 1 is y, 2 what the first step made, and so on."""

    name: str
    a: int
    b: int

    @property
    def takes(self) -> set[int]:
        code = STEPS[self.name]
        return {i for i, place in ((self.a, "{a}"), (self.b, "{b}")) if place in code}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a module does."""

    writes: str
    steps: tuple[Step, ...]
    outputs: tuple[tuple[str, int], ...]
    """A name of ``OUTPUTS`` and the number of a tensor."""

    @classmethod
    def random(cls, seed: int) -> Program:
        rng = random.Random(seed)
        names = [rng.choice(list(STEPS)) for _ in range(rng.randint(2, 7))]
        steps = tuple(Step(name=name, a=rng.randrange(i + 2), b=rng.randrange(i + 2)) for i, name in enumerate(names))
        kinds = ["plain", "plain", *OUTPUTS]
        last = len(steps) + 1
        outputs = tuple((rng.choice(kinds), rng.randint(0, last)) for _ in range(rng.randint(0, 3)))
        writes = rng.choice(list(WRITES)) if rng.random() < 0.4 else "nothing"
        return cls(writes=writes, steps=steps, outputs=(("plain", last), *outputs))

    def does(self, step: str) -> bool:
        return any(one.name == step for one in self.steps)

    @property
    def writes_x(self) -> bool:
        return self.writes in ("x", "column of x")

    @property
    def source(self) -> str:
        """The module's ``forward``."""
        names = ["x", "y", *(f"t{number}" for number in range(len(self.steps)))]
        lines = [WRITES[self.writes]]
        for number in self._needed():
            step = self.steps[number]
            lines += STEPS[step.name].format(z=names[number + 2], a=names[step.a], b=names[step.b]).split("\n")
        given = [OUTPUTS[kind].format(v=names[i]) for kind, i in self.outputs]
        lines.append(f"return ({', '.join(given)},)")
        return "def forward(self, x, y):\n" + "".join(f"    {line}\n" for line in lines if line)

    def _needed(self) -> list[int]:
        """The steps whose doing shows. Compilers leave the others out, and with them the random numbers they draw."""
        needed, numbers = {i for _, i in self.outputs}, []
        for number, step in reversed(list(enumerate(self.steps))):
            if number + 2 in needed or step.name in ("state", "remember"):
                needed |= step.takes | {number + 2}
                numbers.append(number)
        return numbers[::-1]


class RandomModule(nn.Module):
    """Parameters and state that a program's ``forward`` may use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) * 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=dtype))
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=dtype))
        self.register_buffer("last", torch.zeros(WIDTH, dtype=dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    forward: Callable[..., tuple[Any, ...]]
    seen: Tensor


def module_of(program: Program, dtype: torch.dtype) -> RandomModule:
    """A new module that runs a program, with random weights."""
    source = program.source
    name = f"<program {crc32(source.encode()):08x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(compile(source, name, "exec"), namespace)
    kind = type("RandomModule", (RandomModule,), {"forward": namespace["forward"]})
    module: RandomModule = kind(dtype)
    return module
