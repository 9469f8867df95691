"""What is captured, within which bounds, and what is captured for one key: the data of a replayed callable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from graphcap_backend.capture.device import Range
    from graphcap_backend.capture.instance import Instance
    from graphcap_backend.capture.skip import SkipReason


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
    outputs_may_be_copied: bool = False
    """Whether large outputs may be copied at every call to save memory; not when they are saved activations."""
    sizes: tuple[int, ...] | None = None
    """Which of the inputs that are ints are symbolic sizes, and not computed from such; None: all."""
    where: str | None = None
    """The user's line, for messages."""


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


@dataclass(slots=True, eq=False)
class Family:
    """All instances captured for one key."""

    key: tuple[Any, ...]
    static_addresses: list[int]
    """By position among the inputs; 0 for those that are not static."""
    written: tuple[Range, ...] = ()
    """Memory of static inputs that is written to. Inputs that share it cannot be copied in."""
    instances: list[Instance] = field(default_factory=list)
    """In the order in which calls look for an idle one: those that hand out aliases, then the copying one."""
    refused: SkipReason | None = None
    full: bool = False
    """Whether capturing one more instance has failed."""
    copies_only: bool = False
    """Whether outputs are always copied: large ones, whose copy costs little beside the work that makes them."""
