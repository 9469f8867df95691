"""A stand-in for a graph under construction: counts the operators that run, as nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphcap_backend.annotate.config import AnnotationConfig
from graphcap_backend.annotate.recording import Recording

if TYPE_CHECKING:
    from graphcap_backend.annotate.registry import GraphRecord

STACKS = AnnotationConfig(record_py_stacks=True)


@dataclass
class Keys:
    """Identity of a graph that lives as long as the test says."""

    source_graph_id: int = 7
    exec_id: int | None = 9
    living: bool = True

    def exec_graph_id(self) -> int | None:
        return self.exec_id

    def alive(self) -> bool:
        return self.living


class LaunchLog(TorchDispatchMode):
    """Counts operators; ``names`` are theirs, in order."""

    def __init__(self, on_launch: Callable[[int, int], None] | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        self._on_launch = on_launch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._on_launch is not None:
            self._on_launch(0, len(self.names))
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@dataclass
class Recorded:
    """What one block left: the operators that ran, and the record."""

    log: LaunchLog
    keys: Keys
    record: GraphRecord = field(init=False)

    def annotations(self) -> list[Mapping[str, Any] | None]:
        return [self.record.annotation(node) for node in range(len(self.log.names))]

    def named(self, name: str) -> Mapping[str, Any] | None:
        """Annotation of the first operator of that name."""
        return self.record.annotation(self.log.names.index(name))

    def lines(self, name: str) -> list[str]:
        """Functions of the stack of the first operator of that name, innermost first."""
        stack = self.record.stack(self.log.names.index(name)) or ""
        return [line.rpartition(":")[2] for line in stack.splitlines() if "launch_log" not in line]


@contextmanager
def recorded(config: AnnotationConfig = STACKS, keys: Keys | None = None) -> Iterator[Recorded]:
    """Record the block as a host capture does."""
    recording = Recording.start_host(config)
    result = Recorded(LaunchLog(recording.on_node), keys or Keys())
    try:
        with result.log:
            yield result
    except BaseException:
        recording.discard()
        raise
    recording.stop()
    result.record = recording.seal(result.keys)


@contextmanager
def walked(config: AnnotationConfig | None = None) -> Iterator[Recorded]:
    """Record the block by edge walk."""
    log = LaunchLog()
    recording = Recording.start_walk(config or AnnotationConfig(), lambda _: len(log.names))
    result = Recorded(log, Keys())
    try:
        with log:
            recording.bind(1)
            yield result
            recording.stop()  # as a session does: while the stream still captures
    except BaseException:
        recording.discard()
        raise
    result.record = recording.seal(result.keys)


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(*shape).requires_grad_()
