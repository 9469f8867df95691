"""Twelve layers, served and trained into a HostGraph: values, lines, scopes, times. GPU: the file of the same name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import layer_proofs, layered_transformer
from helpers.chrome_traces import replay, write_trace
from helpers.layered_transformer import Transformer, batch
from helpers.package_source import ROOT

from graphcap_backend import (
    HostGraph,
    annotate_trace,
    capture_nodes,
    get_kernel_annotations,
    get_kernel_py_stacks,
    graph,
    mark_kernels,
    report,
)
from graphcap_backend.report import PartReport


@pytest.fixture(scope="module", autouse=True)
def _scopes() -> Iterator[None]:
    layered_transformer.mark = mark_kernels
    yield
    layered_transformer.mark = layered_transformer.no_scope


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@pytest.fixture(scope="module")
def compiled(model: Transformer) -> Any:
    """The model, compiled, after it was trained and served with values equal to eager's."""
    compiled = torch.compile(model, backend="graphcap", options={"host_capture": True})
    layer_proofs.check_trained(model, compiled, "cpu")
    layer_proofs.check_served(model, compiled, "cpu")
    return compiled


def _part(compiled: Any, kind: str) -> PartReport:
    (part,) = (part for part in report(compiled).parts if part.kind == kind)
    return part


@pytest.mark.parametrize("kind", ["inference", "forward", "backward"])
def test_every_node_names_its_layer_s_lines_and_scope(model: Transformer, compiled: Any, kind: str) -> None:
    part = _part(compiled, kind)
    assert part.state == "captured"
    assert part.graphs
    for g in part.graphs:
        nodes = capture_nodes(g)
        layer_proofs.check_lines(nodes)
        layer_proofs.check_call_sites(nodes)
        layer_proofs.check_scopes(nodes, backward=kind == "backward")
        read = layer_proofs.parameters_in_host_graph(model, g)
        layer_proofs.check_parameters(nodes, read)
        layer_proofs.check_order(nodes, read, backward=kind == "backward")
        stacks, annotations = dict(get_kernel_py_stacks()), dict(get_kernel_annotations())
        for node in nodes:
            key = g.exec_id << 32 | node.index
            assert stacks[key] == node.stack
            assert annotations.get(key) == (None if node.annotation is None else [dict(node.annotation)])


def _captured_names(work: Callable[[], object]) -> list[str]:
    g = HostGraph()
    with graph(g):
        work()
    return [node.name for node in capture_nodes(g)]


def test_an_eager_step_has_the_scopes_of_its_pieces_captured_alone() -> None:
    model, x = Transformer(), batch("cpu", 0)
    layer_proofs.keep_inputs(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    g = HostGraph()
    with graph(g, enable_annotations=True, annotation_config={"record_py_stacks": True}):
        layer_proofs.train_step(model, optimizer, x)
    expected = layer_proofs.train_step_by_pieces(model, optimizer, x, _captured_names)
    layer_proofs.check_pieces(capture_nodes(g), expected)
    kinds = Counter(str(node.kind) for node in capture_nodes(g))
    assert min(kinds["memcpy"], kinds["memset"]) >= layered_transformer.NUM_LAYERS

    accumulated = HostGraph()  # the gradients to add to are those of the capture above
    with graph(accumulated, enable_annotations=True):
        model(x).square().mean().backward()
    layer_proofs.check_accumulation(capture_nodes(g), capture_nodes(accumulated), len(list(model.parameters())))


def test_a_trace_of_replays_names_layers_and_lines(compiled: Any, tmp_path: Path) -> None:
    graphs = [_part(compiled, kind).graphs[0] for kind in ("forward", "backward")]
    events, when = [], 0.0
    for correlation, g in enumerate(graphs * 2, 1):
        events += replay(capture_nodes(g), correlation, when)
        when += 10_000
    done = annotate_trace(write_trace(tmp_path / "src.json", events), tmp_path / "dst.json", capture=compiled)
    num_nodes = sum(len(capture_nodes(g)) for g in graphs)
    assert (done.num_replays, done.num_labelled, done.unlabelled) == (4, 2 * num_nodes, {})
    lanes = defaultdict(set)
    for event in json.loads((tmp_path / "dst.json").read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            lanes[event["args"]["graph"]].update(layered_transformer.layers_of(event["args"]["stack"]))
            assert event["args"]["source"]
    assert list(map(len, lanes.values())) == [12, 12]


def test_page_and_flame_graph_have_the_times_of_lines(tmp_path: Path) -> None:
    """The script checks the sums itself; here it is a HostGraph's launches that are timed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "gpu_pictures.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    sums = re.findall(r"^(.+): ([\d.]+) us a call, (\d+) lines$", done.stdout, flags=re.MULTILINE)
    assert [name for name, _, _ in sums] == ["activity records", "page", "flame graph"]
    assert len({(time, lines) for _, time, lines in sums}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "flame.speedscope.json"}


def test_a_newcomer_finds_the_slowest_line_in_two_commands(tmp_path: Path) -> None:
    """Those of README; the first line of the table is the heaviest, with its text."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^    (python -m graphcap_backend [^#\n]+)", readme, flags=re.MULTILINE)
    commands = [command.split() for command in found]
    assert [command[3] for command in commands] == ["demo", "report"]
    for command in commands:
        done = subprocess.run(
            [sys.executable, *command[1:]], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
    table = done.stdout.partition("by source line:\n")[2].partition("by kernel:\n")[0].splitlines()
    shares = [float(row.split("%")[0]) for row in table[::2]]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 100 / len(shares)
    file, line, function = table[0].split()[-1].rsplit(":", 2)
    assert (Path(file).name, function) == ("demo.py", "forward")
    assert table[1].strip() == (ROOT / "graphcap_backend" / "demo.py").read_text().splitlines()[int(line) - 1].strip()
