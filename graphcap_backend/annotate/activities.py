"""CUPTI activity records through cupti-python: what ran on the GPU, and how long.

Importing cupti-python is what keeps ``cupti.py`` from ever finalizing CUPTI in this process again:
after activity records were on, a replay behind ``cuptiFinalize`` is a segmentation fault (measured).
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any

from graphcap_backend.annotate import cupti
from graphcap_backend.annotate.profile import Activity
from graphcap_backend.errors import CuptiBusyError, CuptiError, CuptiMissingError

_BUFFER_BYTES = 8 << 20
_FLUSH_UNFINISHED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED
_KINDS = ("CONCURRENT_KERNEL", "MEMCPY", "MEMSET")


class ActivityRecords:
    """Records kernels, copies and fills of this process while its ``with`` block runs.

    The caller synchronizes the device before the block ends. Needs CUPTI free: it is left without
    activity kinds enabled, but replays cost more host time for the rest of the process.

    Attributes:
        found: what ran; complete once the block has ended.
    """

    def __init__(self) -> None:
        self.found: list[Activity] = []
        self._failure: Exception | None = None
        self._enabled: list[Any] = []

    def __enter__(self) -> ActivityRecords:
        """Start recording.

        Raises:
            CuptiMissingError: libcupti or cupti-python is not there.
            CuptiBusyError: somebody else holds CUPTI.
            CuptiError: it answered something else.
        """
        _require_free()
        self._api = _cupti_python()
        self._call("activity_register_callbacks", self._give_buffer, self._take)
        try:
            for name in _KINDS:
                kind = getattr(self._api.ActivityKind, name)
                self._call("activity_enable", kind)
                self._enabled.append(kind)
            self._num_dropped()  # counts from the last time that somebody asked
        except CuptiError:
            self._disable()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop recording.

        Raises:
            CuptiError: records were lost, or could not be read: what was found is not all that ran.
        """
        try:
            self._call("activity_flush_all", _FLUSH_UNFINISHED)
            num_dropped = self._num_dropped()
        finally:
            self._disable()
        if error is not None:
            return
        if self._failure is not None:
            raise CuptiError("reading activity records", repr(self._failure)) from self._failure
        if num_dropped:
            raise CuptiError(
                "recording activities",
                f"{num_dropped} records dropped beside {len(self.found)} that arrived",
                "CUPTI had no buffer for them, so times would be too short. Measure less at once: smaller num_replays",
            )

    def _num_dropped(self) -> int:
        """Records lost since this was last asked."""
        number = ctypes.c_size_t()
        self._call("activity_get_num_dropped_records", 0, 0, ctypes.addressof(number))
        return number.value

    def _disable(self) -> None:
        while self._enabled:
            self._call("activity_disable", self._enabled.pop())

    def _call(self, function: str, *args: Any) -> None:
        try:
            getattr(self._api, function)(*args)
        except self._api.cuptiError as error:
            raise CuptiError(function, str(error)) from error

    @staticmethod
    def _give_buffer() -> tuple[int, int]:
        return _BUFFER_BYTES, 0

    def _take(self, records: list[Any]) -> None:
        # CUPTI's thread calls this, and the records are gone when it returns.
        try:
            for record in records:
                self.found.append(
                    Activity(_name(record), int(record.graph_node_id), int(record.end) - int(record.start))
                )
        except Exception as error:  # noqa: BLE001 - must not reach CUPTI's C code
            self._failure = self._failure or error


def _name(record: Any) -> str:
    name = getattr(record, "name", None)
    if name is not None:
        return str(name)
    return "memcpy" if hasattr(record, "copy_kind") else "memset"


def _require_free() -> None:
    try:
        cupti.acquire_callbacks()
    except CuptiBusyError as error:
        raise CuptiBusyError(
            error.api,
            error.result,
            "Activity records need CUPTI, which somebody else in this process holds: torch.profiler keeps it for good "
            "after its first profile, Nsight and compute-sanitizer hold it from the start. Profile in a process "
            "without them; a trace that torch.profiler exported can be labelled with annotate_trace()",
        ) from error
    cupti.release_callbacks()


def _cupti_python() -> Any:
    try:
        from cupti import cupti as api
    except ImportError as error:
        raise CuptiMissingError(
            "import cupti", f"ImportError: {error}", "pip install 'cupti-python>=13.0.1,<13.1'"
        ) from error
    return api
