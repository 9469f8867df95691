"""Activity records that CUPTI dropped: said, never left out of the times."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from types import SimpleNamespace

import pytest

from graphcap_backend.annotate.activities import ActivityRecords
from graphcap_backend.annotate.profile import Activity
from graphcap_backend.errors import CuptiError


def _records(num_dropped: int) -> ActivityRecords:
    """As at the end of a block, by when one record arrived."""

    def get_num_dropped(context: int, stream_id: int, dropped: int) -> None:
        assert (context, stream_id) == (0, 0)  # the queue that buffers without a context of their own come from
        ctypes.c_size_t.from_address(dropped).value = num_dropped

    records = ActivityRecords()
    records._api = SimpleNamespace(
        activity_flush_all=lambda flag: None,
        activity_get_num_dropped_records=get_num_dropped,
        cuptiError=ZeroDivisionError,
    )
    records.found.append(Activity("kernel", 0, 5))
    return records


def test_dropped_records_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(CuptiError, match=r"3 records dropped beside 1 that arrived.*smaller num_replays"):
        _records(3).__exit__(None, None, None)
    _records(0).__exit__(None, None, None)


def test_the_blocks_own_error_goes_first() -> None:
    error = ValueError("the user's")
    _records(3).__exit__(ValueError, error, None)  # returns, so that it goes on


def test_cupti_python_takes_these_arguments() -> None:
    api = pytest.importorskip("cupti.cupti")
    number = ctypes.c_size_t()
    with suppress(api.cuptiError, RuntimeError):  # no driver, or CUPTI is not up
        api.activity_get_num_dropped_records(0, 0, ctypes.addressof(number))
    assert number.value == 0
