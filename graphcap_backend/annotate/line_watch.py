"""Which line of a generated wrapper runs, where no callback tells of each node.

A trace function, on for one capture and one thread: it looks at every call, but follows
lines only inside modules that Inductor generated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch

from graphcap_backend.annotate.stacks import provenance_now

_Tracer = Callable[[FrameType, str, Any], Any]


class LineWatch:
    """Calls ``on_line`` with a raw traceback before each line of a generated wrapper, and
    with None when the wrapper returns. A tracer that is on already (a debugger, coverage) is
    left alone, and no line is seen."""

    def __init__(self, on_line: Callable[[Any], None]) -> None:
        self._on_line = on_line
        self._is_generated = provenance_now().is_generated
        # One object each, so that it can be recognized when it is taken off.
        self._at_call: Final[_Tracer] = self._call
        self._at_line: Final[_Tracer] = self._line

    def start(self) -> None:
        """Watch this thread."""
        if sys.gettrace() is None:
            sys.settrace(self._at_call)

    def stop(self) -> None:
        """Stop watching, on the thread of ``start``."""
        if sys.gettrace() is self._at_call:
            sys.settrace(None)

    def _call(self, frame: FrameType, _event: str, _argument: Any) -> _Tracer | None:
        return self._at_line if self._is_generated(frame.f_code.co_filename) else None

    def _line(self, _frame: FrameType, event: str, _argument: Any) -> _Tracer:
        if event == "line":
            self._on_line(torch._C._profiler.gather_traceback(True, False, False))
        elif event == "return":
            self._on_line(None)
        return self._at_line
