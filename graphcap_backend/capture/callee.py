"""What is captured, within which bounds, and what is captured for one key: the data of a replayed callable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Callee:
    """What is captured: a compiled subgraph, a partition of one, or a whole compiled region."""

    run: Callable[[list[Any]], Sequence[Any]]
    """Takes a list of inputs, which it may clear, and returns the outputs."""
    name: str
    device: torch.device
    static: tuple[int, ...] = ()
    mutated: tuple[int, ...] = ()
    donated: frozenset[int] = frozenset()
    constants: tuple[Tensor, ...] = ()
    is_backward: bool = False
    may_share_outputs: bool = False
    """Whether graphs may give the memory of outputs to each other; not that of saved activations, whose addresses
    the backward's graphs know."""
    sizes: tuple[int, ...] | None = None
    """Which of the inputs that are ints are symbolic sizes, and not computed from such; None: all."""
    where: str | None = None
    """The user's line, for messages."""
    entry: Callable[[], str | None] = lambda: None
    """Tells the user's line that calls come in at, once one did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayLimits:
    """Bounds on what one callable keeps captured."""

    max_graphs: int = 64
    max_held_instances: int = 2
    capture_sizes: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None

    def lists(self, sizes: Sequence[int]) -> bool:
        """Whether ``capture_sizes`` wants calls of these symbolic sizes captured."""
        listed = self.capture_sizes
        combinations = [Counter(one) for one in listed or () if isinstance(one, tuple)]
        if combinations:
            return any(Counter(sizes) <= combination for combination in combinations)
        return listed is None or all(size in listed for size in sizes)


@dataclass(slots=True)
class Witness:
    """The very objects that one call got and gave."""

    inputs: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()


class Runner:
    """Runs a callee as AOTAutograd's wrappers do, from wherever it is called.

    Attributes:
        has_run: whether it ever did, to the end.
        witness: takes down what the next call gets and gives, once.
    """

    def __init__(self, callee: Callee) -> None:
        self.has_run = False
        self.witness: Witness | None = None
        self._callee = callee

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        witness, self.witness = self.witness, None
        given = tuple(inputs) if witness is not None else ()
        with torch.no_grad(), torch._C._DisableAutocast():
            outputs = self._callee.run(inputs)
        self.has_run = True
        if witness is not None:
            witness.inputs, witness.outputs = given, tuple(outputs)
        return outputs
