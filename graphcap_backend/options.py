"""Options of the compile backend, and the split between ours and Inductor's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

OnSkip = Literal["ignore", "warn", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphcapOptions:
    """Options of ``torch.compile(model, backend="graphcap", options={...})``; an object of this class may be given too.

    Keys of the dict that are not fields here are taken for Inductor's own configuration
    (``torch._inductor.list_options()``); a key that neither knows raises ValueError.
    """

    host_capture: bool = False
    """Capture subgraphs that run on the CPU into a :class:`HostGraph` instead of leaving them uncaptured."""
    record_stacks: bool = True
    """Record scopes and Python stacks of captured nodes."""
    max_graphs: int = 64
    """Most shape keys kept captured per subgraph; the least recently used one is released for a new one."""
    capture_sizes: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    """With dynamic shapes: which sizes to capture; calls of others run uncaptured. None captures every size.

    ``(1, 2, 4, 8)``: calls whose symbolic sizes are all among these. Where several dimensions vary, list sizes of
    each, or combinations: ``((8, 128), (16, 128))`` captures calls whose sizes are all in one of them, in any order,
    each used once. Symbolic are the sizes (and ints) that Dynamo treats as dynamic, never 0 and 1; a subgraph that
    has only some of the sizes, as after a graph break, is captured if those fit."""
    on_skip: OnSkip = "warn"
    """What a subgraph or a call that cannot be captured does: "ignore" lists it in the report, "warn" also logs
    it once, "error" raises :class:`SkippedError`, at every such call and before the call does anything. Calls that
    run uncaptured as they should are no error: the first at each shape, sizes that ``capture_sizes`` leaves out."""
    max_held_instances: int = 2
    """How many instances of one graph take turns when callers keep outputs; beyond that, outputs are copied. Where
    calls need much memory, instances are more, and this is how many outputs may be held before they are copied."""

    def __post_init__(self) -> None:
        for name in ("host_capture", "record_stacks"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"option {name} must be True or False, found {getattr(self, name)!r}")
        for name in ("max_graphs", "max_held_instances"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"option {name} must be an int of at least 1, found {value!r}")
        if self.on_skip not in get_args(OnSkip):
            raise ValueError(f"option on_skip must be one of {list(get_args(OnSkip))}, found {self.on_skip!r}")
        if self.capture_sizes is not None:
            object.__setattr__(self, "capture_sizes", _sizes(self.capture_sizes))


def _sizes(given: object) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
    """``capture_sizes`` as tuples: sizes, or combinations of sizes."""
    listed = tuple(given) if isinstance(given, Iterable) else (None,)
    if all(_is_size(one) for one in listed) and any(listed):  # none or only 0 would capture nothing at all
        return listed
    if listed and all(isinstance(one, Iterable) for one in listed):
        combinations = tuple(tuple(one) for one in listed)
        if all(map(any, combinations)) and all(_is_size(size) for one in combinations for size in one):
            return combinations
    raise ValueError(
        "option capture_sizes must be None, sizes as in (1, 2, 4), or combinations of sizes as in "
        f"((8, 128), (16, 128)), above 0, found {given!r}"
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def split_options(options: Mapping[str, Any] | GraphcapOptions | None) -> tuple[GraphcapOptions, dict[str, Any]]:
    """Our options, and what is left for Inductor.

    Raises:
        ValueError, TypeError: not a dict by name, or an option of ours that is not what it must be.
    """
    if isinstance(options, GraphcapOptions):
        return options, {}
    if not isinstance(options, Mapping | None):
        raise TypeError(f"options must be a dict or GraphcapOptions, found {type(options).__name__}")
    for key in options or ():
        if not isinstance(key, str):
            raise TypeError(f"options must be a dict from names of options to values, found the key {key!r}")
    names = {field.name for field in dataclasses.fields(GraphcapOptions)}
    given = dict(options or {})
    ours = {key: value for key, value in given.items() if key in names}
    return GraphcapOptions(**ours), {key: value for key, value in given.items() if key not in names}
