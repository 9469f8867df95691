"""Scopes of forward work."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from helpers.launch_log import LaunchLog, recorded

from graphcap_backend import HostGraph, graph
from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.annotate.scopes import current_scope, mark_kernels, merge_annotations


def test_a_str_is_a_name_and_a_dict_is_itself() -> None:
    with recorded() as run:
        with mark_kernels("a"):
            torch.zeros(1)
        with mark_kernels({"layer": 3}):
            torch.ones(1)
        torch.rand(1)
    assert run.annotations() == [{"name": "a"}, {"layer": 3}, None]


def test_nested_scopes_merge_key_by_key_and_dict_by_dict() -> None:
    with recorded() as run, mark_kernels({"name": "outer", "color": "red", "cost": {"flops": 1, "bytes": 2}}):
        with mark_kernels({"name": "inner", "cost": {"bytes": 5}}):
            torch.zeros(1)
        torch.ones(1)
    assert run.annotations() == [
        {"name": "inner", "color": "red", "cost": {"flops": 1, "bytes": 5}},
        {"name": "outer", "color": "red", "cost": {"flops": 1, "bytes": 2}},
    ]


def test_merging_changes_neither_side() -> None:
    outer, inner = {"a": {"x": 1}}, {"a": {"y": 2}, "b": 0}
    assert merge_annotations(outer, inner) == {"a": {"x": 1, "y": 2}, "b": 0}
    assert (outer, inner) == ({"a": {"x": 1}}, {"a": {"y": 2}, "b": 0})


def test_a_dict_and_a_plain_value_do_not_merge() -> None:
    assert merge_annotations({"a": {"x": 1}}, {"a": 2}) == {"a": 2}
    assert merge_annotations({"a": 2}, {"a": {"x": 1}}) == {"a": {"x": 1}}


@pytest.mark.parametrize("wrong", [None, 3, ["a"], ("name", "a"), b"a"])
def test_anything_else_is_a_type_error_recording_or_not(wrong: Any) -> None:
    with pytest.raises(TypeError, match="str or a dict"):
        mark_kernels(wrong)
    with recorded(), pytest.raises(TypeError, match="str or a dict"):
        mark_kernels(wrong)


def test_changing_the_callers_dict_later_does_not_reach_back() -> None:
    annotation = {"name": "a"}
    with recorded() as run, mark_kernels(annotation):
        annotation["name"] = "b"
        torch.zeros(1)
    assert run.annotations() == [{"name": "a"}]


def test_an_exception_leaves_no_scope_behind() -> None:
    with recorded() as run:
        with pytest.raises(ZeroDivisionError), mark_kernels("outer"), mark_kernels("inner"):
            raise ZeroDivisionError
        assert current_scope() is None
        torch.zeros(1)
    assert run.annotations() == [None]


def test_a_failed_capture_inside_scopes_leaves_nothing() -> None:
    gc.collect()
    before = len(PROCESS.records)
    for _ in range(2):
        with pytest.raises(RuntimeError), recorded(), mark_kernels("a"):
            torch.zeros(1).view(7)
        assert current_scope() is None
        assert PROCESS.num_recording == 0
    gc.collect()
    assert len(PROCESS.records) == before


def scope_us() -> float:
    """Time of one scope that has nothing to do; the best of many, since others use the machine too."""

    def scope() -> None:
        with mark_kernels("a"):
            pass

    def once() -> float:
        start = time.perf_counter()
        for _ in range(2000):
            scope()
        return (time.perf_counter() - start) / 2000 * 1e6

    return min(once() for _ in range(20))


def test_outside_a_capture_nothing_is_recorded_and_little_is_paid() -> None:
    with mark_kernels("a"):
        assert current_scope() is None
    assert scope_us() < 2


def test_inside_a_capture_without_annotations_the_same() -> None:
    x = torch.ones(2)
    with graph(HostGraph()):
        x.add_(1)
        with mark_kernels("a"):
            assert current_scope() is None
        cost = scope_us()
    assert cost < 2


def test_after_captures_with_annotations_the_same() -> None:
    for _ in range(2):
        with recorded(), mark_kernels("a"):
            torch.zeros(1)
    assert scope_us() < 2


def test_nothing_is_recorded_once_a_capture_is_over() -> None:
    with recorded() as run, mark_kernels("a"):
        torch.zeros(1)
    with LaunchLog(), mark_kernels("b"):
        torch.zeros(1)
    assert run.annotations() == [{"name": "a"}]


def test_two_threads_capture_at_once_each_with_its_own_scopes() -> None:
    runs: dict[str, list[Any]] = {}
    together = threading.Barrier(2, timeout=30)

    def capture(name: str) -> None:
        with recorded() as run:
            together.wait()
            for _ in range(50):
                with mark_kernels(name):
                    torch.zeros(1)
                torch.ones(1)
        runs[name] = run.annotations()

    threads = [threading.Thread(target=capture, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == {name: [{"name": name}, None] * 50 for name in ("a", "b")}


def test_annotations_can_be_pickled() -> None:
    with recorded() as run, mark_kernels({"name": "a", "shape": (1, 2)}), mark_kernels({"inner": {"k": 1}}):
        torch.zeros(1)
    (annotation,) = run.annotations()
    assert annotation is not None
    assert pickle.loads(pickle.dumps(dict(annotation))) == {"name": "a", "shape": (1, 2), "inner": {"k": 1}}
