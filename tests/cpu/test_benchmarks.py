"""The parts of ``python -m benchmarks`` that need no GPU: statistics, targets, table, results, and how it fails."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.benchmarks_package import load
from helpers.package_source import ROOT

measure = load("measure")
models = load("models")
peer_handler = load("peer_handler")
row_module = load("rows")
runner = load("runner")
settings_module = load("settings")
table = load("table")

Row, Target = row_module.Row, row_module.Target


def command(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def a_ratio(ours: list[float], theirs: list[float], target: object = None) -> object:
    samples = {"a": ours, "b": theirs}
    return row_module.ratio_row("name", "what", samples, ours="a", theirs="b", unit="us", target=target)


def test_summary_is_median_and_quartiles() -> None:
    summary = measure.summarize([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (summary.low, summary.median, summary.high, summary.num_samples) == (2.0, 3.0, 4.0, 5)


def test_one_sample_is_its_own_spread() -> None:
    summary = measure.summarize([7.0])
    assert (summary.low, summary.median, summary.high) == (7.0, 7.0, 7.0)


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        measure.summarize([])


def test_ratio_is_taken_round_by_round() -> None:
    # The machine was ten times slower in between; that is no spread of the ratio.
    row = a_ratio([1.0, 10.0, 5.0], [2.0, 20.0, 10.0])
    assert (row.figure.low, row.figure.median, row.figure.high) == (0.5, 0.5, 0.5)
    assert row.sides["a"].median == 5.0


def test_ratio_needs_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="found 2 and 1"):
        measure.ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("figure", "expected"), [(0.35, "aim"), (0.351, "bar"), (0.50, "bar"), (0.5001, "no"), (float("nan"), "no")]
)
def test_reached(figure: float, expected: str) -> None:
    assert a_ratio([figure], [1.0], Target(bar=0.50, aim=0.35)).reached == expected


def test_nothing_is_reached_without_target_or_figure() -> None:
    assert a_ratio([1.0], [1.0]).reached is None
    assert Row(name="a", what="b", status="skipped", target=Target(bar=1.0)).reached is None


def test_sides_take_turns_and_each_begins_a_round() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return 1.0

    samples = measure.alternate({"a": lambda: side("a"), "b": lambda: side("b")}, rounds=4, seconds=60)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(values) for name, values in samples.items()} == {"a": 4, "b": 4}


def test_time_ends_a_measurement_after_the_least_rounds() -> None:
    assert len(measure.alternate({"a": lambda: 1.0}, rounds=1000, seconds=0)["a"]) == measure.LEAST_ROUNDS


def test_holding_keeps_the_last_result_and_dropping_none() -> None:
    class Result:
        alive = 0

        def __init__(self) -> None:
            Result.alive += 1
            seen.append(Result.alive)

        def __del__(self) -> None:
            Result.alive -= 1

    seen: list[int] = []
    measure.dropping(Result)(3)
    assert seen == [1, 1, 1]
    seen.clear()
    measure.holding(Result)(3)
    assert seen == [1, 2, 2]
    seen.clear()
    measure.host_holding(Result, lambda: None, 2)
    assert seen == [1, 2, 2, 2, 2]


def test_rows_survive_json() -> None:
    rows = [
        a_ratio([1.0, 2.0], [4.0, 4.0], Target(bar=0.5)),
        row_module.value_row("v", "w", [1.0], unit="us/node", sides={"a": [1.0, 2.0]}, note="n"),
        Row(name="s", what="t", status="skipped", note="no peer"),
    ]
    text = json.dumps([row.to_json() for row in rows])
    assert [Row.from_json(data) for data in json.loads(text)] == rows
    assert json.loads(text)[0]["reached"] == "bar"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00042, "0.000420"),
        (-0.017, "-0.0170"),
        (0.35, "0.350"),
        (1.25, "1.250"),
        (27.337, "27.34"),
        (163.52, "163.5"),
        (2230.4, "2230"),
    ],
)
def test_numbers_are_short_and_do_not_vanish(value: float, text: str) -> None:
    assert table.number(value) == text


def test_table_says_figure_bar_and_whether_reached() -> None:
    rows = [
        a_ratio([1.0, 1.0, 1.2], [2.0, 2.0, 2.0], Target(bar=0.6, aim=0.4)),
        Row(name="peer", what="beside the peer", status="skipped", target=Target(bar=0.5), note="no file"),
    ]
    assert table.render(rows).splitlines() == [
        "row    figure     quartiles   bar   aim  reached",
        "----  -------  ------------  ----  ----  -------",
        "name  0.500 x  0.500..0.550  0.60  0.40  bar",
        "    what [us]: a 1.000 (1.000..1.100), b 2.000 (2.000..2.000)",
        "peer        -             -  0.50     -  skipped",
        "    beside the peer",
        "    no file",
    ]
    assert table.verdict(rows) == "1 of 1 bars kept; skipped: peer"


def test_fresh_copies_share_no_code_and_no_weights() -> None:
    model = models.Mlp(2, 4)
    one, other = models.fresh(model), models.fresh(model)
    x = torch.randn(3, 4)
    assert torch.equal(one(x), model(x))
    assert len({id(type(m).forward.__code__) for m in (model, one, other)}) == 3
    assert next(iter(one.parameters())) is not next(iter(other.parameters()))
    assert models.fresh(models.add_one).__code__ is not models.add_one.__code__


def test_values_that_differ_from_eager_are_no_measurement() -> None:
    with pytest.raises(AssertionError, match="side gives other values"):
        models.assert_close(torch.full((2,), float("nan")), torch.ones(2), "side")


def test_a_failing_row_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(load("nodes").ROWS, "nodes", fail)
    (row,) = runner.measure_row("nodes", "nodes", settings_module.Settings(device="cpu"))
    assert (row.name, row.status, row.note) == ("nodes", "failed", "RuntimeError: no such kernel")
    assert "no such kernel" in capsys.readouterr().err


def test_rows_of_a_process_that_dies_are_reported() -> None:
    # A device that does not exist ends the process before it measures.
    settings = settings_module.Settings(device="nowhere")
    rows = runner.run(["recording", "nesting"], settings, seconds=60)
    assert [(row.name, row.status) for row in rows] == [("recording", "failed"), ("nesting", "failed")]
    assert "status 2" in rows[0].note


def test_every_topic_has_the_rows_it_is_asked_for() -> None:
    for topic, names in runner.TOPICS.items():
        assert set(names) == set(load(topic).ROWS)


def test_peer_s_file_runs_with_stand_ins(tmp_path: Path) -> None:
    file = tmp_path / "_graph_node_callbacks.py"
    file.write_text(
        """
_STACK_CACHE, _NOISE_CACHE, _RECORD_PY_STACKS = {}, {}, False
def _stack_filter_roots(paths):
    return ()
def _on_graph_node_created(_domain, _cbid, cbdata):
    from cuda.bindings import runtime
    from cupti import cupti as _cupti
    from torch.cuda._graph_annotations import current_annotation, record_node_annotation, record_node_py_stack
    from torch.cuda._utils import _check_cuda_bindings
    data = _cupti.GraphData.from_ptr(_cupti.ResourceData.from_ptr(cbdata).resource_descriptor)
    tools_id = _check_cuda_bindings(runtime.cudaGraphNodeGetToolsId(data.node))
    record_node_annotation(tools_id, current_annotation())
    if _RECORD_PY_STACKS:
        record_node_py_stack(tools_id, "a stack")
"""
    )
    handler = peer_handler.PeerHandler(peer_handler.find_peer(str(file)), lambda node: (7 << 32) | node)
    graph_data = peer_handler._GraphData(node=5)
    resource = peer_handler._ResourceData(resource_descriptor=ctypes.addressof(graph_data))
    handler.on_created(3, 13, ctypes.addressof(resource))
    assert handler.stacks == {(7 << 32) | 5: "a stack"}
    assert handler.annotations == {(7 << 32) | 5: {"name": "work"}}


def test_without_cuda_the_command_says_what_is_missing() -> None:
    done = command(env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m benchmarks measures an NVIDIA GPU and found none: torch ")
    assert "Run it on a machine with a GPU, an NVIDIA driver, and torch for CUDA" in line


def test_an_unknown_row_names_the_known_ones() -> None:
    done = command("one-kernels")
    assert done.returncode == 2
    assert "no row one-kernels; rows are: one-kernel, mlp4" in done.stderr


def test_results_file(tmp_path: Path) -> None:
    file = tmp_path / "results" / "cpu.json"
    done = command("nodes", "--device", "cpu", "--quick", "--output", str(file))
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    assert results["versions"]["torch"] == torch.__version__
    assert {"CUPTI", "CUDA of the driver", "GPU", "triton", "cuda-bindings"} <= results["versions"].keys()
    assert results["command"] == "python -m benchmarks nodes --device cpu --quick --output cpu.json"
    assert [row["name"] for row in results["rows"]] == [
        f"nodes/{name}" for name in ("read", "render", "recorded/read", "recorded/render")
    ]
    assert all(row["figure"]["num_samples"] == 2 for row in results["rows"])
    assert (results["device"], results["quick"]) == ("cpu", True)
    assert "nodes/recorded/render" in done.stdout
    assert "mean nothing" in done.stdout
