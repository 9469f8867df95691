"""Labels in Chrome traces: only where it is certain which node an event is, nothing else touched."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.chrome_traces import CPU_EVENTS, Event, gpu_event, launch, replay, write_trace
from helpers.node_lists import chain, kernel
from helpers.saved_captures import model_nodes, saved

from graphcap_backend import Node, NodeKind, NodeList, SavedCapture, SavedCaptureError, annotate_trace, save_capture
from graphcap_backend.annotate.trace import AnnotatedTrace
from graphcap_backend.capture.nodes import Memcpy, Memset

ADD = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"
ADD_SHOWN = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)


def _annotate(folder: Path, events: list[Event], capture: SavedCapture) -> tuple[AnnotatedTrace, list[Event]]:
    src = write_trace(folder / "src.json", events)
    before = src.read_bytes()
    done = annotate_trace(src, folder / "dst.json", capture=capture)
    assert src.read_bytes() == before
    whole = json.loads((folder / "dst.json").read_text())
    assert {**whole, "traceEvents": 0} == {**json.loads(before), "traceEvents": 0}
    return done, whole["traceEvents"]


def _nodes_found(events: list[Event]) -> list[Any]:
    return [event["args"].get("node") for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def test_labels_of_a_replay(tmp_path: Path) -> None:
    nodes = model_nodes()
    events = [*CPU_EVENTS, *replay(nodes, 5, 100), *CPU_EVENTS, *replay(nodes, 6, 200)]
    done, found = _annotate(tmp_path, events, saved(nodes))
    assert (done.num_events, done.num_replays, done.num_labelled, done.num_labelled_by_id) == (16, 2, 6, 0)
    assert not done.unlabelled
    first = found[5]
    assert first["args"] == {
        **events[5]["args"],
        "scope": "mlp",
        "annotation": {"name": "mlp"},
        "source": ["/m/model.py:10:forward"],
        "module": ["up"],
        "stack": ["/m/model.py:10:forward", "/m/main.py:3:<module>"],
        "graph": "graph 0",
        "node": 0,
    }
    assert {key: value for key, value in first.items() if key != "args"} == {
        key: value for key, value in events[5].items() if key != "args"
    }
    assert found[6]["args"]["scope"] == "mlp + residual"
    assert "scope" not in found[7]["args"]
    assert _nodes_found(found) == [0, 1, 2, 0, 1, 2]
    others = [event for event in found[: len(events)] if event.get("cat") != "kernel"]
    assert others == [event for event in events if event.get("cat") != "kernel"]


def test_text_of_other_events_is_kept(tmp_path: Path) -> None:
    odd = (
        '{"traceEvents" : [ {"cat":"cpu_op","ts":1.00,"n":1E5,"x":"\\u00fc\\ttab\t"} ,\n\n'
        '{"ts": 12345678901234567890.125}\n]  }\n'
    )
    (tmp_path / "src.json").write_text(odd)
    annotate_trace(tmp_path / "src.json", tmp_path / "dst.json", capture=saved(chain("a")))
    assert (tmp_path / "dst.json").read_text() == odd


def test_scope_lanes(tmp_path: Path) -> None:
    scopes = ["a", "a", "b", None, "a"]
    nodes = NodeList(
        [kernel(i, f"k{i}", annotation={"name": scope} if scope else None) for i, scope in enumerate(scopes)]
    )
    events = [*replay(nodes, 5, 100), *replay(nodes, 6, 200)]
    _, found = _annotate(tmp_path, events, saved(nodes))
    lanes = [event for event in found if event.get("cat") == "graphcap_scope"]
    assert [(event["name"], event["ts"], event["dur"]) for event in lanes] == [
        ("a", 110, 3.5),
        ("b", 114, 1.5),
        ("a", 118, 1.5),
        ("a", 210, 3.5),
        ("b", 214, 1.5),
        ("a", 218, 1.5),
    ]
    (named,) = (event for event in found if event["ph"] == "M" and event["name"] == "thread_name")
    assert named["args"] == {"name": "scopes of stream 7"}
    assert {(event["pid"], event["tid"]) for event in lanes} == {(named["pid"], named["tid"])}
    assert named["tid"] != 7


def test_mark_stream_lanes(tmp_path: Path) -> None:
    nodes = NodeList([kernel(0, "a"), kernel(1, "b", annotation={"name": "comm", "stream": 60})])
    _, found = _annotate(tmp_path, replay(nodes, 5, 100, stream=13), saved(nodes))
    moved = found[2]
    assert (moved["tid"], moved["args"]["stream"], moved["args"]["original_stream"]) == (60, 60, 13)
    assert (found[1]["tid"], found[1]["args"]["stream"]) == (13, 13)
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert names[60] == "stream lane 60 (comm)"


def test_names_are_compared_as_the_profiler_shows_them(tmp_path: Path) -> None:
    nodes = NodeList([kernel(0, ADD)])
    shown = gpu_event(replace(nodes[0], name=ADD_SHOWN), 5, 110)
    done, _ = _annotate(tmp_path, [launch(5, 100), shown], saved(nodes))
    assert done.num_labelled == 1


def test_copies_and_fills(tmp_path: Path) -> None:
    copy = Node(
        index=0, kind=NodeKind.MEMCPY, name="", memcpy=Memcpy(source="device", destination="device", num_bytes=64)
    )
    fill = Node(
        index=1,
        kind=NodeKind.MEMSET,
        name="",
        memset=Memset(value=0, element_bytes=1, num_bytes=32),
        dependencies=(0,),
    )
    empty = Node(index=2, kind=NodeKind.EMPTY, name="", dependencies=(1,))
    nodes = NodeList([copy, fill, empty, kernel(3)])
    good = [launch(5, 100), *(gpu_event(nodes[i], 5, 110 + i) for i in (0, 1, 3))]
    done, found = _annotate(tmp_path, good, saved(nodes))
    assert _nodes_found(found) == [0, 1, 3]
    # So an H200 shows a copy of few bytes inside a graph.
    by_kernel = [good[0], {**good[1], "cat": "kernel", "name": "memcpy32_post"}, *good[2:]]
    del by_kernel[1]["args"]["bytes"]
    done, found = _annotate(tmp_path, by_kernel, saved(nodes))
    assert _nodes_found(found) == [0, 1, 3]
    good[1]["args"]["bytes"] = 65
    done, _ = _annotate(tmp_path, good, saved(nodes))
    assert done.unlabelled == {"no captured graph has these kernels": 3}


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([0, 1, 2, 2], id="one too many"),
        pytest.param([0, 1], id="one too few"),
        pytest.param([1, 0, 2], id="another order"),
    ],
)
def test_a_replay_of_another_graph_is_left_alone(tmp_path: Path, order: list[int]) -> None:
    nodes = model_nodes()
    events = replay([nodes[i] for i in order], 5, 100)
    done, found = _annotate(tmp_path, events, saved(nodes))
    assert (done.num_labelled, done.num_unlabelled) == (0, len(order))
    assert found == events
    assert "left as they were: no captured graph" in str(done)


def test_other_launch_shapes_are_another_graph(tmp_path: Path) -> None:
    nodes = model_nodes()
    other = NodeList([replace(node, grid=(9, 1, 1)) for node in nodes])
    done, found = _annotate(tmp_path, replay(other, 5, 100), saved(nodes, other))
    assert [event["args"]["graph"] for event in found if event.get("cat") == "kernel"] == ["graph 1"] * 3
    assert done.num_labelled == 3


def test_eager_kernels_are_no_replay(tmp_path: Path) -> None:
    nodes = chain("gemm")
    events = [launch(5, 100, "cudaLaunchKernel"), gpu_event(nodes[0], 5, 110), *replay(nodes, 6, 120)]
    done, found = _annotate(tmp_path, events, saved(nodes))
    assert (done.num_replays, _nodes_found(found)) == (1, [None, 0])


def test_parallel_branches(tmp_path: Path) -> None:
    """Equal kernels on two branches can run in any order; others of the graph are still certain."""
    nodes = NodeList(
        [
            kernel(0, "start"),
            kernel(1, "same", dependencies=(0,)),
            kernel(2, "same", dependencies=(0,)),
            kernel(3, "left", dependencies=(1,)),
            kernel(4, "right", dependencies=(2,)),
            kernel(5, "same", dependencies=(3, 4)),
            kernel(6, "end", dependencies=(5,)),
        ]
    )
    events = replay([nodes[i] for i in (0, 2, 1, 4, 3, 5, 6)], 5, 100)
    done, found = _annotate(tmp_path, events, saved(nodes))
    assert _nodes_found(found) == [0, None, None, 4, 3, None, 6]
    assert done.unlabelled == {"equal kernels on parallel branches": 3}


def test_equal_graphs_of_one_model_are_one_answer(tmp_path: Path) -> None:
    """Two instances that take turns have the same lines; two layers with the same kernels have not."""
    nodes = model_nodes()
    done, found = _annotate(tmp_path, replay(nodes, 5, 100), saved(nodes, model_nodes()))
    assert _nodes_found(found) == [0, 1, 2]
    other = NodeList([replace(nodes[0], sources=("/m/model.py:99:forward",)), *nodes[1:]])
    done, found = _annotate(tmp_path, replay(nodes, 5, 100), saved(nodes, other))
    assert _nodes_found(found) == [None] * 3
    assert list(done.unlabelled) == ["several captured graphs with different lines have these kernels"]


def test_graph_node_ids_decide(tmp_path: Path) -> None:
    """With ids, order means nothing, equal graphs are told apart, and foreign graphs are left alone."""
    nodes = model_nodes()
    other = NodeList([replace(node, sources=(f"/m/other.py:{node.index}:f",)) for node in nodes])
    capture = saved(nodes, other, exec_ids=(21, 22))
    events = [
        *replay(nodes, 5, 100, exec_id=21),
        *replay([nodes[i] for i in (2, 0, 1)], 6, 200, exec_id=22),
        *replay(nodes, 7, 300, exec_id=99),
    ]
    done, found = _annotate(tmp_path, events, capture)
    assert _nodes_found(found) == [0, 1, 2, 2, 0, 1, None, None, None]
    assert [event["args"]["graph"] for event in found[:8] if event["cat"] == "kernel"] == ["graph 0"] * 3 + [
        "graph 1"
    ] * 3
    assert (done.num_labelled, done.num_labelled_by_id) == (6, 6)
    assert done.unlabelled == {"graph node ids of a graph that was not captured here, or of a conditional body": 3}


def test_ids_of_another_process_fall_back_to_order(tmp_path: Path) -> None:
    """The numbers may even be the same by chance: then names tell."""
    nodes = model_nodes()
    capture = saved(nodes, chain("x", "y", "z"), exec_ids=(21, 22))
    done, found = _annotate(tmp_path, replay(nodes, 5, 100, exec_id=22), capture)
    assert _nodes_found(found) == [0, 1, 2]
    assert (done.num_labelled, done.num_labelled_by_id) == (3, 0)


def test_conditional_bodies_by_id(tmp_path: Path) -> None:
    """How often a body runs, and with which ids, nobody knows; the nodes around it are certain."""
    condition = Node(index=1, kind=NodeKind.CONDITIONAL, name="", body=chain("inner"), dependencies=(0,))
    nodes = NodeList([kernel(0, "before"), condition, kernel(2, "after", dependencies=(1,))])
    ran = [(nodes[0], 0), (kernel(0, "inner"), 7), (kernel(0, "inner"), 7), (nodes[2], 2)]
    events = [launch(5, 100)]
    events += [gpu_event(node, 5, 110 + at, **{"graph node id": 21 << 32 | i}) for at, (node, i) in enumerate(ran)]
    done, found = _annotate(tmp_path, events, saved(nodes, exec_ids=(21,)))
    assert _nodes_found(found) == [0, None, None, 2]
    assert (done.num_labelled_by_id, done.num_unlabelled) == (2, 2)


def test_child_graphs_by_id_and_by_order(tmp_path: Path) -> None:
    body = NodeList([kernel(0, "inner"), kernel(1, "inner2")])
    child = Node(
        index=1, kind=NodeKind.CHILD_GRAPH, name="", body=body, dependencies=(0,), annotation={"name": "child"}
    )
    nodes = NodeList([kernel(0, "outer"), child, kernel(2, "outer", dependencies=(1,))])
    ran = [(nodes[0], 0), (body[0], 3), (body[1], 4), (nodes[2], 2)]
    for with_ids in (True, False):
        ids = [{"graph node id": 21 << 32 | i} if with_ids else {} for _, i in ran]
        events = [
            launch(5, 100),
            *(gpu_event(node, 5, 110 + at, **ids[at]) for at, (node, _) in enumerate(ran)),
        ]
        done, found = _annotate(tmp_path, events, saved(nodes, exec_ids=(21,)))
        assert _nodes_found(found) == [0, "1.0", "1.1", 2]
        assert found[2]["args"]["scope"] == "child"
        assert done.num_labelled_by_id == (4 if with_ids else 0)


def test_gzip_and_a_capture_from_a_file(tmp_path: Path) -> None:
    nodes = model_nodes()
    src = write_trace(tmp_path / "src.json.gz", replay(nodes, 5, 100))
    save_capture(tmp_path / "c.json.gz", saved(nodes))
    done = annotate_trace(src, tmp_path / "dst.json.gz", capture=tmp_path / "c.json.gz")
    assert done.num_labelled == 3
    with gzip.open(tmp_path / "dst.json.gz", "rt") as file:
        assert _nodes_found(json.load(file)["traceEvents"])[:3] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected '{', found the end of the file"),
        ("[]", r"expected '{', found '\[\]'"),
        ("{}", "expected a list traceEvents"),
        ('{"a": 1}', "expected a list traceEvents"),
        ('{"traceEvents": {}}', r"expected '\['"),
        ('{"traceEvents": [{"a": 1}, {"b": ', "at character 27 expected JSON"),
        ('{"traceEvents": [{"a": 1}]', "expected '}'"),
        ('{"traceEvents": [{"a": 1} {"b": 1}]}', r"expected '\]'"),
        ('{"traceEvents": []} more', "expected nothing more"),
    ],
)
def test_no_trace(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "src.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        annotate_trace(tmp_path / "src.json", tmp_path / "dst.json", capture=saved(chain("a")))
    assert [path.name for path in tmp_path.iterdir()] == ["src.json"]


def test_cut_off_anywhere(tmp_path: Path) -> None:
    content = write_trace(tmp_path / "src.json", replay(model_nodes(), 5, 100)).read_text()
    for length in range(0, len(content) - 2, 17):
        (tmp_path / "src.json").write_text(content[:length])
        with pytest.raises(ValueError, match="cut off"):
            annotate_trace(tmp_path / "src.json", tmp_path / "dst.json", capture=saved(model_nodes()))


def test_refusals(tmp_path: Path) -> None:
    src = write_trace(tmp_path / "src.json", replay(model_nodes(), 5, 100))
    (tmp_path / "dst.json").write_text("old")
    with pytest.raises(ValueError, match="same file"):
        annotate_trace(src, src, capture=saved(model_nodes()))
    with pytest.raises(SavedCaptureError):
        annotate_trace(src, tmp_path / "dst.json", capture=src)
    assert (tmp_path / "dst.json").read_text() == "old"
    annotate_trace(src, tmp_path / "dst.json", capture=saved(model_nodes()))
    with pytest.raises(ValueError, match="annotated already"):
        annotate_trace(tmp_path / "dst.json", tmp_path / "again.json", capture=saved(model_nodes()))
    (tmp_path / "src.json.gz").write_bytes(gzip.compress(src.read_bytes())[:-30])
    with pytest.raises(ValueError, match="cut off"):
        annotate_trace(tmp_path / "src.json.gz", tmp_path / "new.json", capture=saved(model_nodes()))


_LARGE = """
import resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from helpers.chrome_traces import CPU_EVENTS, replay, write_trace
from helpers.node_lists import layers
from helpers.saved_captures import saved
from graphcap_backend import annotate_trace

nodes = layers(2500)
def events():
    for number in range(40):
        yield from replay(nodes, number + 1, number * 10000.0)
        for _ in range(500):
            yield from CPU_EVENTS
write_trace(Path("src.json"), events())
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
done = annotate_trace("src.json", "dst.json", capture=saved(nodes))
assert done.num_labelled == 100_000, done
seconds = time.perf_counter() - start
extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) << 10
print(Path("src.json").stat().st_size, seconds, extra)
"""


def test_a_large_trace_streams(tmp_path: Path) -> None:
    """40 MB here; 500 MB in under 2 GB follows from the same bytes of memory per byte of trace."""
    command = [sys.executable, "-c", _LARGE, str(Path(__file__).parents[1])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    size, seconds, extra = map(float, done.stdout.split())
    assert size > 30e6
    assert extra < 3 * size
    assert seconds < 60
