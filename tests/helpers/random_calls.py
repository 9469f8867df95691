"""What differs between the calls of a random program: drawn before either side of a comparison makes them.

Each program gets its own variety, since most of what may differ between two calls costs a compile. Within that, each
call is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers.random_programs import Program
from torch import Tensor

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "transposed": lambda t: t.t().contiguous().t(),
    "with gaps": lambda t: torch.cat([t, t], 1)[:, ::2],
    "at an offset": lambda t: torch.cat([t[:1], t])[1:],
    "expanded": lambda t: t[:1].expand(t.shape),
}

MODES = (
    *[("train",)] * 5,
    ("train", "no_grad"),
    ("train", "inference"),
    ("train", "eval"),
    ("no_grad",),
    ("inference",),
    ("no_grad", "inference"),
    ("eval", "no_grad"),
)


@dataclass(frozen=True, kw_only=True)
class Variety:
    """What differs between the calls of one program."""

    dtype: torch.dtype
    modes: tuple[str, ...]
    sizes: tuple[int, ...]
    dynamic: bool | None
    inputs: str
    """What is special about inputs: "plain", a name of ``LAYOUTS``, "same twice", "overlapping", "gradients"."""
    donated: bool
    """Whether backwards may reuse the memory of what was saved for them; they run only once then."""
    options: tuple[tuple[str, Any], ...]
    shares: bool
    """Whether graphs share the memory of outputs, and are dropped for larger ones, as if they needed much."""

    @classmethod
    def random(cls, seed: int, program: Program) -> Variety:
        rng = random.Random(f"variety {seed}")
        modes = rng.choice(MODES)
        if program.does("remember"):  # eager keeps an inference tensor then, which later modes may not use
            modes = tuple("no_grad" if mode == "inference" else mode for mode in modes)
        special = rng.choice([*LAYOUTS, "same twice", "overlapping", "gradients"]) if rng.random() < 0.4 else "plain"
        if special == "overlapping" and program.writes != "nothing":
            special = "plain"  # torch.compile does not notice when written inputs share memory at some calls only
        sizes = rng.choice([(3,), (3,), (2, 3), (2, 3, 5)]) if special in ("plain", "gradients") else (3,)
        return cls(
            dtype=rng.choice([torch.float32, torch.float64]),
            modes=modes,
            sizes=sizes,
            dynamic=True if len(sizes) > 1 and rng.random() < 0.7 else None,
            inputs=special,
            donated=rng.random() < 0.7,
            options=(
                ("record_stacks", rng.random() < 0.25),
                ("max_graphs", rng.choice([64, 64, 64, 2])),
                ("max_held_instances", rng.choice([1, 2, 2, 3])),
            ),
            shares=rng.random() < 0.6,
        )


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call and what its caller does round it."""

    weights: str
    mode: str
    rows: int
    x: str
    special_inputs: bool
    seed: int | None
    """Of the random state before the call; None goes on from this side's last call."""
    zero: str
    hold: str
    scribble: int | None
    """Which output or input the caller writes to afterwards, where autograd is off."""
    backward: str
    drop_outputs: bool
    """Whether outputs that are not held are gone when the backward runs."""
    late: float | None
    """Which earlier backward runs afterwards, as a share of those that wait."""

    @classmethod
    def random(cls, rng: random.Random, variety: Variety, *, first: bool) -> Call:
        return cls(
            weights=rng.choice(["same"] * 30 + ["in place"] * 5 + ["step"] * 5 + [".data", "replaced", "zero state"]),
            mode=rng.choice(variety.modes),
            rows=rng.choice(variety.sizes),
            x=rng.choice(["fresh", "fresh", "past"]),
            special_inputs=rng.random() < 0.5,
            seed=rng.randrange(1000) if first or rng.random() < 0.5 else None,
            zero=rng.choice(["keep", "keep", "zero", "none"]),
            hold=rng.choice(["nothing", "nothing", "all", "views", "storages", "one less"]),
            scribble=rng.randrange(9) if rng.random() < 0.3 else None,
            backward=rng.choice(["now", "now", "now", "first output", "grad", "twice", "later", "later", "never"]),
            drop_outputs=rng.random() < 0.5,
            late=rng.random() if rng.random() < 0.5 else None,
        )
