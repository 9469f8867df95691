"""Undoing the steps of an operation in reverse, whether it failed or not."""

from __future__ import annotations

from collections.abc import Callable


class UndoStack:
    """Steps taken so far, each with what takes it back.

    ``restore`` steps run at the end of every operation, ``on_failure`` steps only when it failed. All
    of them run, in reverse order, also when one of them raises.
    """

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: list[tuple[bool, Callable[[], None]]] = []

    def restore(self, step: Callable[[], None]) -> None:
        """Run ``step`` at the end in any case."""
        self._steps.append((False, step))

    def on_failure(self, step: Callable[[], None]) -> None:
        """Run ``step`` only if the operation fails."""
        self._steps.append((True, step))

    def succeed(self) -> None:
        """End an operation that went well. Raises the first error of a step, after all have run."""
        errors = self._run(failed=False)
        if errors:
            raise errors[0]

    def fail(self, error: BaseException) -> None:
        """Take everything back. Errors of steps become notes on ``error``, which stays the one to raise."""
        for ours in self._run(failed=True):
            error.add_note(f"graphcap, while undoing the capture: {type(ours).__name__}: {ours}")

    def _run(self, *, failed: bool) -> list[BaseException]:
        errors: list[BaseException] = []
        while self._steps:
            only_on_failure, step = self._steps.pop()
            if only_on_failure and not failed:
                continue
            try:
                step()
            except BaseException as error:  # noqa: BLE001  every step must run
                errors.append(error)
        return errors
