"""Refusing, inside a CUDA capture, work that only a first call does: compiling and tuning.

Both synchronize and would spoil the capture, with an error about something else. They are refused at
their own beginning instead, so the capture is still good if the block catches the error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class FirstCallGuard:
    """Watches Dynamo and Triton while CUDA captures are under way.

    Args:
        refuse: called with what is about to be done, on the thread that does it; it raises where a
            capture would be spoiled.
    """

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse
        self._holders = 0
        self._undo: list[Callable[[], None]] = []

    def hold(self) -> None:
        """Begin to watch, or watch on. What is not loaded yet is not loaded for it."""
        self._holders += 1
        if self._holders > 1:
            return
        dynamo = sys.modules.get("torch._dynamo.callback")
        if dynamo is not None:
            self._watch_dynamo(dynamo)
        autotuner = sys.modules.get("triton.runtime.autotuner")
        if autotuner is not None:
            self._watch_triton(autotuner)

    def release(self) -> None:
        """Take one hold back."""
        self._holders -= 1
        while not self._holders and self._undo:
            self._undo.pop()()

    def _watch_dynamo(self, dynamo: Any) -> None:
        handler, triggers = dynamo.callback_handler, dynamo.CallbackTrigger
        compiles = (triggers.DYNAMO, triggers.LAZY_BACKWARD)

        def on_compile(args: Any) -> None:
            if args.callback_trigger in compiles:
                self._refuse("torch.compile compiles a function here, at its first call or for new shapes")

        def forget() -> None:
            if on_compile in handler.start_callbacks:  # torch._dynamo.reset() drops all of them
                handler.remove_start_callback(on_compile)

        handler.register_start_callback(on_compile)
        self._undo.append(forget)

    def _watch_triton(self, autotuner: Any) -> None:
        kind = autotuner.Autotuner
        bench = kind._bench

        def watched_bench(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(getattr(tuner, "base_fn", None), "__name__", "a kernel")
            self._refuse(f"Triton tunes {name} here, at its first call or for a new key")
            return bench(tuner, *args, **kwargs)

        kind._bench = watched_bench
        self._undo.append(lambda: setattr(kind, "_bench", bench))
