"""Work of ours that belongs to a line of the user's: launched from a frame that says so.

A raw traceback taken below such a frame names that line, as if the user's code had launched the work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from graphcap_backend.annotate import backward
from graphcap_backend.annotate.stacks import StackFilter, describe, provenance_now, symbolize


def calling_line() -> str | None:
    """The innermost line of the user's on this thread's stack, "file:line:function".

    In a compiled region that is the first line of the function that was compiled.
    """
    provenance = provenance_now()
    default = StackFilter(None, provenance)
    (frames,) = symbolize([torch._C._profiler.gather_traceback(True, False, False)])
    stack = describe(frames, provenance, default, default).stack
    return stack.partition("\n")[0] if stack else None


def launch_from(where: str | None, launch: Callable[[], object]) -> None:
    """Call ``launch`` from a frame at ``where`` ("file:line:function"; None adds no frame).

    While a recording walks edges, what is launched gets its traceback here; callbacks take their own.
    """

    def launch_and_tell() -> None:
        walk = backward.current_walk()
        if walk is None:
            launch()
            return
        walk.mark_line(torch._C._profiler.gather_traceback(True, False, False))
        launch()
        walk.mark_line(None)

    if where is None:
        launch_and_tell()
        return
    file, line, function = where.rsplit(":", 2)
    code = compile("\n" * (int(line) - 1) + "launch()", file, "exec").replace(co_name=function, co_qualname=function)
    exec(code, {"launch": launch_and_tell})
