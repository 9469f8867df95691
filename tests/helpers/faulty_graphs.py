"""Graphs whose methods fail on demand, and the state that a failed capture must leave as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class InjectedError(Exception):
    """Raised on purpose."""


def faulty(kind: type[Any]) -> type[Any]:
    """A subclass of a graph class that raises InjectedError once, at the point named by ``fail_at``.

    Points: "before capture_begin", "after capture_begin", and the same with capture_end.
    """

    class Faulty(kind):  # type: ignore[misc]
        fail_at: str | None = None

        def _maybe_fail(self, point: str) -> None:
            if self.fail_at == point:
                self.fail_at = None
                raise InjectedError(point)

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            self._maybe_fail("before capture_begin")
            super().capture_begin(*args, **kwargs)
            self._maybe_fail("after capture_begin")

        def capture_end(self) -> None:
            self._maybe_fail("before capture_end")
            super().capture_end()
            self._maybe_fail("after capture_end")

    return Faulty


FAULT_POINTS = ("before capture_begin", "after capture_begin", "before capture_end", "after capture_end")


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Check that gc, modes, grad mode, CPU generator and the annotation tables come back."""
    from graphcap_backend import get_kernel_annotations, get_kernel_py_stacks
    from graphcap_backend.annotate.process import PROCESS as RECORDINGS
    from graphcap_backend.capture.process import PROCESS

    def state() -> dict[str, Any]:
        return {
            "gc enabled": gc.isenabled(),
            "gc frozen": gc.get_freeze_count() > 10_000,  # Python itself freezes a few when it starts
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "function modes": torch._C._len_torch_function_stack(),
            "grad": torch.is_grad_enabled(),
            "seed state": torch.get_rng_state().sum().item(),
            "captures": PROCESS.num_active,
            "recordings": RECORDINGS.num_recording,
            "by graph": len(RECORDINGS.by_graph),
            "callbacks": RECORDINGS.callbacks is not None,
            "annotations": len(get_kernel_annotations()),
            "stacks": len(get_kernel_py_stacks()),
        }

    before = state()
    yield
    assert state() == before
