"""What a captured graph leaves behind, and when it is gone."""

from __future__ import annotations

import gc
import gzip
import json
from collections.abc import MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.launch_log import Keys, Recorded, recorded

from graphcap_backend.annotate.config import AnnotationConfig
from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.annotate.registry import (
    dump_kernel_py_stacks,
    get_kernel_annotations,
    get_kernel_py_stacks,
    load_kernel_py_stacks,
    resolve_pending_annotations,
)
from graphcap_backend.annotate.scopes import mark_kernels


def capture(keys: Keys, name: str = "a") -> Recorded:
    with recorded(keys=keys) as run:
        with mark_kernels(name):
            torch.zeros(1)
        torch.ones(1)
    return run


def mine(view: Any, *graph_ids: int) -> dict[int, Any]:
    """Entries of these graphs; other tests may have left theirs."""
    return {key: value for key, value in view.items() if key >> 32 in graph_ids}


def test_keys_follow_every_instantiate() -> None:
    keys = Keys(source_graph_id=100, exec_id=None)
    run = capture(keys)
    view = get_kernel_annotations()
    assert mine(view, 100) == {100 << 32: [{"name": "a"}]}
    for exec_id in (101, 102):
        keys.exec_id = exec_id
        assert mine(view, 100, 101, 102) == {exec_id << 32: [{"name": "a"}]}
        assert set(mine(get_kernel_py_stacks(), 100, 101, 102)) == {exec_id << 32, exec_id << 32 | 1}
    assert run.record.way == "host"


def test_annotations_accumulate_over_graphs_and_die_one_by_one() -> None:
    runs = [capture(Keys(200 + i, 210 + i), f"graph {i}") for i in range(3)]
    view = get_kernel_annotations()
    assert [mine(view, 210, 211, 212)[(210 + i) << 32] for i in range(3)] == [
        [{"name": f"graph {i}"}] for i in range(3)
    ]
    del runs[1]
    gc.collect()
    assert set(mine(view, 210, 211, 212)) == {210 << 32, 212 << 32}


def test_a_reset_graph_has_no_entries_though_its_record_is_held() -> None:
    keys = Keys(300, 301)
    run = capture(keys)
    assert mine(get_kernel_py_stacks(), 301)
    keys.living = False
    assert not mine(get_kernel_py_stacks(), 301)
    assert not mine(get_kernel_annotations(), 301)
    assert run.record.annotation(0) is None
    assert run.record.stack(0) is None


def test_views_are_read_only_and_give_copies() -> None:
    run = capture(Keys(400, 401))
    view = get_kernel_annotations()
    assert not isinstance(view, MutableMapping)
    view[401 << 32][0]["name"] = "changed"
    assert view[401 << 32] == [{"name": "a"}]
    assert run.record.annotation(0) == {"name": "a"}
    with pytest.raises(KeyError):
        view[401 << 32 | 7]


def test_many_captures_leave_nothing() -> None:
    gc.collect()
    before = len(PROCESS.records)
    for _ in range(1000):
        capture(Keys())
    gc.collect()
    assert len(PROCESS.records) == before


def test_bodies_of_child_graphs_have_keys_under_exec_only() -> None:
    kernel = SimpleNamespace(kind="kernel", body=None)
    nodes = [kernel, SimpleNamespace(kind="child_graph", body=[kernel, kernel])]
    for key_by_exec in (True, False):
        keys = Keys(500, 501 if key_by_exec else None)
        with recorded(keys=keys) as run:
            torch.zeros(1)
            with mark_kernels("child"):
                torch.ones(1)
        run.record.read_shape_with(lambda: nodes)  # type: ignore[arg-type, return-value]
        found = mine(get_kernel_annotations(), 500, 501)
        if key_by_exec:
            assert found == {501 << 32 | 2: [{"name": "child"}], 501 << 32 | 3: [{"name": "child"}]}
        else:
            assert found == {}


def test_dump_and_load(tmp_path: Path) -> None:
    run = capture(Keys(600, 601))
    path = tmp_path / "stacks.json.gz"
    dump_kernel_py_stacks(str(path))
    with gzip.open(path, "rt") as text:
        assert json.load(text)[str(601 << 32)] == run.record.stack(0)
    assert load_kernel_py_stacks(path) == dict(get_kernel_py_stacks())
    assert list(tmp_path.iterdir()) == [path]


def test_a_dump_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "stacks.json.gz"
    path.mkdir()
    run = capture(Keys(700, 701))
    with pytest.raises(OSError):
        dump_kernel_py_stacks(path)
    assert list(tmp_path.iterdir()) == [path]
    assert run.record.stack(0)


def test_loading_something_else_says_so(tmp_path: Path) -> None:
    path = tmp_path / "other.gz"
    for content in ("[]", '{"x": "y"}', '{"1": 2}'):
        with gzip.open(path, "wt") as text:
            text.write(content)
        with pytest.raises(ValueError, match="holds no stacks"):
            load_kernel_py_stacks(path)
    path.write_text("{}")
    with pytest.raises(OSError):
        load_kernel_py_stacks(path)


def test_resolving_early_changes_nothing() -> None:
    run = capture(Keys(800, 801))
    resolve_pending_annotations()
    resolve_pending_annotations()
    assert run.annotations() == [{"name": "a"}, None]
    assert (run.record.stack(1) or "").count("\n") > 0


class Counting(Keys):
    """Counts how often it is asked for the executable graph's id."""

    num_asked = 0

    def exec_graph_id(self) -> int | None:
        self.num_asked += 1
        return super().exec_graph_id()


def test_look_ups_ask_the_graph_that_has_the_key_only() -> None:
    others = [Counting(900 + i, 910 + i) for i in range(5)]
    keys = Counting(920, 921)
    runs = [capture(each) for each in (*others, keys)]
    view = get_kernel_py_stacks()
    assert view[921 << 32]  # compares the ids of all graphs
    for other in others:
        other.num_asked = 0
    for _ in range(10):
        assert view.get(921 << 32 | 1) == runs[-1].record.stack(1)
    assert [other.num_asked for other in others] == [0] * 5
    assert view.get(922 << 32) is None


def test_a_loop_over_a_view_asks_each_graph_once() -> None:
    keys = Counting(930, 931)
    run = capture(keys)
    for view in (get_kernel_annotations(), get_kernel_py_stacks()):
        for read in (view.items, view.values, view.keys, lambda view=view: iter(view)):
            keys.num_asked = 0
            assert list(read())
            assert keys.num_asked == 1 + (read == view.keys), read  # list() of keys asks for their number too
    assert run.record.way == "host"


def test_look_ups_follow_instantiate_reset_and_deletion() -> None:
    keys = Keys(940, 941)
    run = capture(keys)
    view = get_kernel_annotations()
    assert view[941 << 32] == [{"name": "a"}]
    keys.exec_id = 942
    assert view.get(941 << 32) is None
    assert view[942 << 32] == [{"name": "a"}]
    keys.living = False
    assert 942 << 32 not in view
    keys.living = True
    run = capture(Keys(940, 942), "b")  # the number is free for another graph now
    assert view[942 << 32] == [{"name": "b"}]
    del run
    gc.collect()
    assert view.get(942 << 32) is None


def test_two_graphs_of_one_number_are_both_looked_up() -> None:
    """A HostGraph's and a CUDA graph's may be the same."""
    runs = [capture(Keys(950, 951)), capture(Keys(950, 951))]
    runs[1].record.read_shape_with(lambda: [SimpleNamespace(kind="empty", body=None)] * 5)  # type: ignore[arg-type, return-value]
    assert get_kernel_annotations()[951 << 32] == [{"name": "a"}]


@pytest.mark.parametrize("key", ["a", None, 3.5, -1, (1, 2)])
def test_what_is_no_key_is_in_no_view(key: Any) -> None:
    assert get_kernel_annotations().get(key) is None
    assert key not in get_kernel_py_stacks()


def test_source_keys_do_not_follow_instantiate() -> None:
    with recorded(AnnotationConfig(key_by="source", record_py_stacks=True), Keys(960, 961)) as run:
        torch.ones(1)
    assert set(mine(get_kernel_py_stacks(), 960, 961)) == {960 << 32}
    assert get_kernel_py_stacks()[960 << 32] == run.record.stack(0)
    assert get_kernel_py_stacks().get(961 << 32) is None


def test_bodies_under_source_keys_have_keys_of_their_own_graphs() -> None:
    kernel = SimpleNamespace(kind="kernel", body=None)
    nodes = [kernel, SimpleNamespace(kind="child_graph", body=[kernel]), SimpleNamespace(kind="conditional", body=None)]
    with recorded(AnnotationConfig(key_by="source", record_py_stacks=True), Keys(962, 963)) as run:
        torch.zeros(1)
        for name in ("child", "conditional"):
            with mark_kernels(name):
                torch.ones(1)
    run.record.read_shape_with(lambda: nodes)  # type: ignore[arg-type, return-value]
    run.record.add_body_keys({964 << 32: 1, 965 << 32 | 4: 2})
    view = get_kernel_annotations()
    assert mine(view, *range(962, 966)) == {964 << 32: [{"name": "child"}], 965 << 32 | 4: [{"name": "conditional"}]}
    assert view[965 << 32 | 4] == [{"name": "conditional"}]
    assert view.get(965 << 32) is None
    assert set(mine(get_kernel_py_stacks(), *range(962, 966))) == {962 << 32, 964 << 32, 965 << 32 | 4}


def test_nodes_reported_without_their_source_have_an_exec_key_too() -> None:
    nodes = [SimpleNamespace(kind=kind, body=None) for kind in ("kernel", "host", "memcpy", "memset")]
    with recorded(AnnotationConfig(key_by="source"), Keys(966, None)) as run, mark_kernels("a"):
        for _ in nodes:
            torch.zeros(1)
    run.record.read_shape_with(lambda: nodes)  # type: ignore[arg-type, return-value]
    view = get_kernel_annotations()
    source = {966 << 32 | low for low in range(4)}
    assert set(mine(view, 966, 967, 968)) == source
    for exec_id in (967, 968):
        run.keys.exec_id = exec_id
        assert set(mine(view, 966, 967, 968)) == source | {exec_id << 32 | 1, exec_id << 32 | 2}
        assert view[exec_id << 32 | 2] == [{"name": "a"}]
        assert view.get(exec_id << 32) is None


def test_conditional_bodies_have_no_keys_and_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(kind="kernel", body=None)
    conditional = SimpleNamespace(kind="conditional", body=[kernel, kernel])
    child = SimpleNamespace(kind="child_graph", body=[kernel])
    monkeypatch.setattr(PROCESS, "_warned", set())
    runs = []
    for number in range(2):
        with recorded(keys=Keys(970 + number, 980 + number)) as run:
            with mark_kernels("conditional"):
                torch.zeros(1)
            torch.ones(1)
            with mark_kernels("child"):
                torch.ones(1)
        run.record.read_shape_with(lambda: [conditional, kernel, child])  # type: ignore[arg-type, return-value]
        runs.append(run)
    with pytest.warns(RuntimeWarning, match=r"inside nodes \[0, 2\]") as warned:
        stacks = dict(get_kernel_py_stacks())
    assert len(warned) == 1
    assert set(mine(stacks, 980, 981)) == {980 << 32 | 1, 981 << 32 | 1}
    assert mine(get_kernel_annotations(), 980, 981) == {}


def test_conditionals_that_nothing_is_recorded_of_are_no_matter() -> None:
    nodes = [SimpleNamespace(kind="kernel", body=None), SimpleNamespace(kind="conditional", body=None)]
    with recorded(keys=Keys(990, 991)) as run:
        torch.zeros(1)
    run.record.read_shape_with(lambda: nodes)  # type: ignore[arg-type, return-value]
    assert set(mine(get_kernel_py_stacks(), 991)) == {991 << 32}  # warnings are errors here
