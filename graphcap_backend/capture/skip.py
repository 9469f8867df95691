"""Why something was not captured, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SkipKind(StrEnum):
    """Kinds of reasons for a call or a subgraph that is not captured."""

    CPU = "cpu"
    """The subgraph runs on the CPU and host capture is off."""
    INDUCTOR = "inductor"
    """Inductor says that the subgraph is not safe to capture."""
    NOTHING_TO_CAPTURE = "nothing_to_capture"
    """The subgraph launches nothing: its tensors have no elements."""
    CPU_TENSOR_INPUT = "cpu_tensor_input"
    """A tensor on the CPU is an input of a subgraph on a GPU; its value would be frozen into the graph."""
    OTHER_DEVICE_INPUT = "other_device_input"
    GENERATOR_INPUT = "generator_input"
    SEQUENCE_INPUT = "sequence_input"
    """A list or tuple of tensors, which no replay follows: what a loop of tensors carries."""
    OVERLAP = "overlap"
    """An input overlaps itself, or a mutated input overlaps another one."""
    CAPTURE_FAILED = "capture_failed"
    TOO_MANY_SHAPES = "too_many_shapes"
    CHANGING_NUMBER = "changing_number"
    """A Python number, or a CPU scalar read as one, differs from call to call."""
    SIZE_NOT_LISTED = "size_not_listed"
    """The option ``capture_sizes`` does not name this size."""
    OUTPUTS_HELD = "outputs_held"
    """Every instance of the graph would have overwritten what callers hold, and capturing one more came to nothing."""
    ALREADY_CAPTURING = "already_capturing"
    """The call was made inside somebody's capture and became part of it."""
    STREAM_CAPTURED = "stream_captured"
    """A replay would have had to wait for a stream that somebody is capturing, and so become part of that."""
    WARM_UP = "warm_up"
    """The first call at a key runs uncaptured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipReason:
    """Why a subgraph or a call was not captured, where, and what would help."""

    kind: SkipKind
    detail: str
    where: str | None = None
    """The user's line, "file:line:function", where it is known."""
    advice: str = ""

    def __str__(self) -> str:
        text = self.detail
        if self.where:
            text += f" (at {self.where})"
        return f"{text}. {self.advice}" if self.advice else text
