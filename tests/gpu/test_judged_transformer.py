"""Twelve layers on a GPU: values, lines, scopes, times. A process for each program, CUPTI being one a process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.fresh_process import needs_cuda, run_fresh
from helpers.package_source import ROOT


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    needs_cuda()
    pytest.importorskip("cupti.cupti", reason="needs cupti-python")


TESTS = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
"""

NO_IMPORT = """
import torch
from helpers import layer_proofs
from helpers.layered_transformer import Mlp, Transformer
torch.manual_seed(0)
mlp, transformer = Mlp().cuda(), Transformer().cuda()
assert not [name for name in sys.modules if name.startswith("graphcap")]
compiled_mlp = torch.compile(mlp, backend="graphcap")
compiled = torch.compile(transformer, backend="graphcap")
"""

PARTS = """
def check_parts(compiled, *kinds):
    from graphcap_backend import report
    print(report(compiled))
    parts = report(compiled).parts
    assert sorted(part.kind for part in parts) == sorted(kinds), kinds
    for part in parts:
        assert (part.state, part.way) == ("captured", "cupti"), part
        assert part.graphs and part.num_replays >= 2, part
    return [(part, g) for part in parts for g in part.graphs]
"""


def test_served_without_an_import(tmp_path: Path) -> None:
    run_fresh(
        NO_IMPORT
        + PARTS
        + """
layer_proofs.check_served(mlp, compiled_mlp, "cuda")
layer_proofs.check_served(transformer, compiled, "cuda")
from graphcap_backend import capture_nodes
for part, g in check_parts(compiled, "inference"):
    layer_proofs.check_lines(capture_nodes(g))
    layer_proofs.check_call_sites(capture_nodes(g))
    assert not [node for node in capture_nodes(g) if node.annotation]
for part, g in check_parts(compiled_mlp, "inference"):
    sources = [source for node in capture_nodes(g) for source in node.sources]
    assert sources and all("layered_transformer.py" in source for source in sources)
""",
        tmp_path,
        TESTS,
    )


def test_trained_without_an_import(tmp_path: Path) -> None:
    run_fresh(
        NO_IMPORT
        + PARTS
        + """
layer_proofs.check_trained(mlp, compiled_mlp, "cuda")
layer_proofs.check_trained(transformer, compiled, "cuda")
from graphcap_backend import capture_nodes
check_parts(compiled_mlp, "forward", "backward")
for part, g in check_parts(compiled, "forward", "backward"):
    layer_proofs.check_lines(capture_nodes(g))
    layer_proofs.check_call_sites(capture_nodes(g))
    assert not [node for node in capture_nodes(g) if node.annotation]
""",
        tmp_path,
        TESTS,
    )


RECORDS = """
from collections import Counter

def shown(name):
    return torch._C._demangle(name) if name.startswith("_Z") else name

def check_records(found, graphs):
    \"\"\"Every record of a graph is of a node that says the same of itself; returns how often each graph ran.

    Args:
        graphs: nodes by the id of their executable graph.
    \"\"\"
    stacks, annotations = dict(get_kernel_py_stacks()), dict(get_kernel_annotations())
    times = Counter()
    for record in found:
        if not record.node_id:
            continue  # input copies, eager work
        node = graphs[record.node_id >> 32][record.node_id & 0xFFFFFFFF]
        if node.kind == "kernel":
            assert shown(record.name) == shown(node.name), (record, node)
        else:  # graphs copy few bytes by a kernel of that name
            assert record.name.startswith(node.kind), (record, node)
        assert stacks[record.node_id] == node.stack, (record, node)
        expected = None if node.annotation is None else [dict(node.annotation)]
        assert annotations.get(record.node_id) == expected, (record, node)
        times[record.node_id] += 1
    for exec_id, nodes in graphs.items():
        counts = {times[exec_id << 32 | node.index] for node in layer_proofs.work(nodes)}
        assert len(counts) == 1, (counts, nodes.render())
        yield exec_id, counts.pop()
"""


def test_trained_and_served_by_activity_records(tmp_path: Path) -> None:
    run_fresh(
        TESTS
        + PARTS
        + RECORDS
        + """
from graphcap_backend import save_capture
from helpers import layer_proofs, layered_transformer
layered_transformer.mark = mark_kernels
torch.manual_seed(0)
model = layered_transformer.Transformer().cuda()
compiled = torch.compile(model, backend="graphcap")
layer_proofs.check_trained(model, compiled, "cuda")
layer_proofs.check_served(model, compiled, "cuda")

kinds = ("forward", "backward", "inference")
for part, g in check_parts(compiled, *kinds):
    nodes = capture_nodes(g)
    layer_proofs.check_lines(nodes)
    layer_proofs.check_call_sites(nodes)
    layer_proofs.check_scopes(nodes, backward=part.kind == "backward")
    read = layer_proofs.parameters_in_cuda_graph(model, g)
    layer_proofs.check_parameters(nodes, read)
    layer_proofs.check_order(nodes, read, backward=part.kind == "backward")

def step(number):
    model.zero_grad()
    (compiled(layered_transformer.batch("cuda", number)) - 1).square().mean().backward()

saved = save_capture("capture.json.gz", compiled)  # learns ids: before records are on
from graphcap_backend.annotate.activities import ActivityRecords
torch.cuda.synchronize()
with ActivityRecords() as records:
    for number in range(4):
        step(number)
    with torch.no_grad():
        for number in range(4):
            compiled(layered_transformer.batch("cuda", number))
    torch.cuda.synchronize()
counts = dict(check_records(records.found, {graph.exec_graph_id: graph.nodes for graph in saved.graphs}))
for part in saved.parts:
    assert sum(counts[saved.graphs[at].exec_graph_id] for at in part.graphs) == 4, (part, counts)
""",
        tmp_path,
    )


def test_an_eager_step_has_the_scopes_of_its_pieces_captured_alone(tmp_path: Path) -> None:
    run_fresh(
        TESTS
        + RECORDS
        + """
from helpers import layer_proofs, layered_transformer
layered_transformer.mark = mark_kernels
torch.manual_seed(0)
model, x = layered_transformer.Transformer().cuda(), layered_transformer.batch("cuda", 0)
layer_proofs.keep_inputs(model, x)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    layer_proofs.train_step(model, optimizer, x)

def accumulate():
    model(x).square().mean().backward()

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
        accumulate()
torch.cuda.current_stream().wait_stream(side)

def names(work):
    g = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with graph(g):
        work()
    return [node.name for node in capture_nodes(g)]

g = capture(step, STACKS)
nodes = capture_nodes(g)
accumulated = capture_nodes(capture(accumulate))  # onto the gradients of the capture above
walked = capture_nodes(capture(step, {"backend": "edge_walk"}))
layer_proofs.check_pieces(nodes, layer_proofs.train_step_by_pieces(model, optimizer, x, names))
layer_proofs.check_copies_and_fills(nodes)
layer_proofs.check_accumulation(nodes, accumulated, len(list(model.parameters())))
assert [(node.name, node.annotation) for node in walked] == [(node.name, node.annotation) for node in nodes]

(exec_id,) = {key >> 32 for key in get_kernel_py_stacks()}
from graphcap_backend.annotate.activities import ActivityRecords
torch.cuda.synchronize()
with ActivityRecords() as records:
    for _ in range(3):
        g.replay()
    torch.cuda.synchronize()
assert dict(check_records(records.found, {exec_id: nodes})) == {exec_id: 3}
""",
        tmp_path,
    )


def test_page_trace_and_flame_graph_of_a_served_transformer(tmp_path: Path) -> None:
    """The script compares sums, line by line, with the raw activity records, and raises where they differ by 1%."""
    command = [sys.executable, str(ROOT / "docs" / "gpu_pictures.py"), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    found = re.findall(r"^(.+): ([\d.]+) us a call", done.stdout, flags=re.MULTILINE)
    assert [name for name, _ in found] == ["activity records", "page", "flame graph", "trace"]
    times = [float(time) for _, time in found]
    assert times[1:3] == pytest.approx([times[0]] * 2, rel=0.01)
    assert times[3] == pytest.approx(times[0], rel=0.3)  # other replays, other clocks
