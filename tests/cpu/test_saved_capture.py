"""Saved captures: what comes back is what was saved, and nothing else is taken for one."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.node_lists import kernel, layers
from helpers.saved_captures import model_nodes, profiled, saved

from graphcap_backend import (
    GraphcapError,
    HostGraph,
    Node,
    NodeKind,
    NodeList,
    SavedCaptureError,
    SkipKind,
    SkipReason,
    capture_nodes,
    graph,
    load_capture,
    mark_kernels,
    report,
    save_capture,
    write_flame_graph,
    write_page,
)
from graphcap_backend.capture.nodes import Conditional, Memcpy, Memset
from graphcap_backend.show.saved import SavedPart


def _every_field() -> NodeList:
    body = NodeList([kernel(0, "inner"), kernel(1, "inner", cluster=(2, 1, 1))])
    return NodeList(
        [
            kernel(0, "k", cluster=(1, 2, 3), shared_mem_bytes=48, annotation={"name": "a", "deep": {"x": [1, None]}}),
            Node(index=1, kind=NodeKind.MEMCPY, name="", memcpy=Memcpy(source="host", destination="host", num_bytes=8)),
            Node(index=2, kind=NodeKind.MEMSET, name="m", memset=Memset(value=7, element_bytes=4, num_bytes=64)),
            Node(index=3, kind=NodeKind.BATCH_MEM_OP, name="", mem_ops=("wait_value_32", "write_value_64")),
            Node(index=4, kind=NodeKind.MEM_ALLOC, name="", alloc_bytes=0, dependencies=(0, 1)),
            Node(index=5, kind=NodeKind.CHILD_GRAPH, name="", body=body, dependencies=(4,)),
            Node(
                index=6,
                kind=NodeKind.CONDITIONAL,
                name="",
                conditional=Conditional(decides="if", body_sizes=(1, 1)),
                body=body,
            ),
            kernel(7, "k", dependencies=(5, 6), programmatic_dependencies=(6,), stack="a.py:1:f\nb.py:2:g"),
            kernel(8, "k", sources=("a.py:1:f", "c.py:3:h"), modules=("m.0",), stack="a.py:1:f\nb.py:2:g"),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("name", ["c.json", "c.json.gz"])
def test_round_trip_of_every_field(tmp_path: Path, name: str) -> None:
    part = SavedPart(
        name="region 0 forward",
        kind="forward",
        partition=0,
        num_partitions=1,
        state="captured",
        reasons=(SkipReason(kind=SkipKind.OVERLAP, detail="d", where="m.py:1:f", advice="a"),),
        where=None,
        num_keys=1,
        graphs=(0, 1),
        num_nodes=9,
        num_bytes=1 << 40,
        num_replays=3,
        fallbacks={"warm_up": 1},
        way="cupti",
    )
    capture = replace(saved(_every_field(), NodeList([]), exec_ids=(5, None)), parts=(part,))
    save_capture(tmp_path / name, capture)
    assert load_capture(tmp_path / name) == capture
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_round_trip_of_times(tmp_path: Path) -> None:
    profile = profiled(model_nodes(), [300, 101, 7], outside=50)
    save_capture(tmp_path / "c.json", profile)
    loaded = load_capture(tmp_path / "c.json")
    assert loaded.profile == profile
    save_capture(tmp_path / "again.json", loaded)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "c.json").read_bytes()


def test_a_host_capture_with_scopes_and_stacks(tmp_path: Path) -> None:
    x = torch.ones(4)
    g = HostGraph()
    with graph(g, enable_annotations=True, annotation_config={"record_py_stacks": True}):
        with mark_kernels("first"):
            y = x + 1
        y.mul_(2)
    save_capture(tmp_path / "c.json", g)
    loaded = load_capture(tmp_path / "c.json")
    assert loaded.graphs[0].nodes == capture_nodes(g)
    assert loaded.graphs[0].exec_graph_id == g.exec_id
    file, line, _ = loaded.graphs[0].nodes[0].sources[0].rsplit(":", 2)
    assert loaded.source_text[file][int(line)].strip() == "y = x + 1"


def test_annotation_values_that_json_does_not_know(tmp_path: Path) -> None:
    annotation = {"name": "a", 3: (1, 2), ("t", 1): {4}, "dtype": torch.float16}
    save_capture(tmp_path / "c.json", saved(NodeList([kernel(0, annotation=annotation)])))
    loaded = load_capture(tmp_path / "c.json").graphs[0].nodes[0].annotation
    assert loaded == {"name": "a", "3": [1, 2], "('t', 1)": "{4}", "dtype": "torch.float16"}


def test_loading_needs_no_cuda_and_no_model(tmp_path: Path) -> None:
    save_capture(tmp_path / "c.json.gz", profiled(layers(3), [1, 2, 3]))
    program = """
import sys
from graphcap_backend import load_capture
capture = load_capture("c.json.gz")
print(capture.graphs[0].nodes.render(), capture.profile.by_line()[0].label)
heavy = {"cupti", "triton"} & {name.split(".")[0] for name in sys.modules}
assert not heavy and "torch._inductor" not in sys.modules and not sys.modules["torch"].cuda.is_initialized(), heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "model.py:2:forward" in done.stdout


def _edited(edit: Callable[[dict[str, object]], object]) -> Callable[[bytes], bytes]:
    def apply(content: bytes) -> bytes:
        whole = json.loads(content)
        edit(whole)
        return json.dumps(whole).encode()

    return apply


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("c.json", lambda content: b"", "cut off or no saved capture"),
        ("c.json", lambda content: b"\xff\xfe\x00", "cut off or no saved capture"),
        ("c.json", lambda content: b"[1, 2]", "expected a file that save_capture"),
        ("c.json", lambda content: b'{"traceEvents": []}', "expected a file that save_capture"),
        ("c.json", _edited(lambda whole: whole.update(version=2)), "has version 2 .* reads version 1.*graphcap 0"),
        ("c.json", _edited(lambda whole: whole.update(version=None, versions=3)), "has version None"),
        ("c.json", _edited(lambda whole: whole.pop("graphs")), "damaged .KeyError: 'graphs'"),
        ("c.json", _edited(lambda whole: whole["graphs"][0]["nodes"][0].update(kind="k")), "damaged"),
        ("c.json", _edited(lambda whole: whole["graphs"][0]["nodes"][0].update(colour=1)), "damaged"),
        ("c.json", _edited(lambda whole: whole["graphs"][0]["nodes"][0].update(stack=9)), "damaged"),
        ("c.json", _edited(lambda whole: whole["profile"]["times"][0].append(1)), "damaged"),
        ("c.json.gz", lambda content: content, "its name says gzip"),
        ("c.json.gz", lambda content: gzip.compress(content)[:-20], "cut off"),
        ("c.json.gz", lambda content: gzip.compress(content)[:40] + b"zz" * 20, "saved capture"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, spoil: Callable[[bytes], bytes], message: str) -> None:
    save_capture(tmp_path / "good.json", profiled(model_nodes(), [3, 2, 1]))
    (tmp_path / name).write_bytes(spoil((tmp_path / "good.json").read_bytes()))
    with pytest.raises(SavedCaptureError, match=message):
        load_capture(tmp_path / name)


@pytest.mark.parametrize("name", ["c.json", "c.json.gz"])
def test_cut_off_anywhere(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_capture(path, saved(model_nodes()))
    content = path.read_bytes()
    for length in range(0, len(content) - 1, 11):
        path.write_bytes(content[:length])
        with pytest.raises(SavedCaptureError):
            load_capture(path)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_capture(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError):
        load_capture(tmp_path / "none.json.gz")


class _Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_a_failing_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    save_capture(path, saved(layers(2)))
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="no text"):
        save_capture(path, saved(NodeList([kernel(0, annotation={"name": _Unspeakable()})])))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        save_capture(tmp_path / "no" / "c.json", saved(layers(2)))


def test_what_can_be_saved() -> None:
    with pytest.raises(GraphcapError, match="needs a graph captured"):
        save_capture("unused.json", HostGraph())
    with pytest.raises(ValueError, match=r"^save_capture\(.*\) takes what torch\.compile\(.*, found builtin_function"):
        save_capture("unused.json", len)


def test_nothing_to_save_is_no_silence(tmp_path: Path) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="graphcap", options={"host_capture": True})
    with pytest.warns(UserWarning, match="the saved capture is empty: nothing was compiled"):
        save_capture(tmp_path / "c.json", compiled)
    assert load_capture(tmp_path / "c.json").graphs == ()


@pytest.mark.parametrize("write", [save_capture, write_flame_graph, lambda path, source: write_page(source, path)])
def test_arguments_in_the_wrong_order(write: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    with pytest.raises(
        ValueError, match=r"^expected (save_c|write_[pf])\w+\(.*, found the path '/.*c\.json' in place of"
    ):
        write(saved(layers(2)), file)
    assert not list(tmp_path.iterdir())


def test_other_than_a_captured_graph_has_no_nodes() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="graphcap")
    for given, kind in ((compiled, "function"), (report(compiled), "Report"), ([HostGraph()], "list")):
        with pytest.raises(
            GraphcapError, match=rf"takes one captured graph, found {kind}; .*report\(compiled\)\.graphs"
        ):
            capture_nodes(given)
    with pytest.raises(TypeError, match=r"another NodeList, .* found str"):
        layers(2).diff("x")  # type: ignore[arg-type]
