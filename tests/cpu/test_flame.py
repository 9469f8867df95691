"""Flame graphs: valid for speedscope, and weights that sum up to what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.saved_captures import model_nodes, profiled, saved

from graphcap_backend import NodeList, write_flame_graph
from graphcap_backend.files import opened_text

SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "speedscope-file-format-schema.json").read_text())


def _written(path: Path, source: Any, **options: Any) -> dict[str, Any]:
    write_flame_graph(path, source, **options)
    with opened_text(path) as file:
        whole: dict[str, Any] = json.load(file)
    jsonschema.validate(whole, SCHEMA)
    return whole


def _stacks(whole: dict[str, Any]) -> dict[tuple[str, ...], float]:
    (profile,) = whole["profiles"]
    names = [frame["name"] for frame in whole["shared"]["frames"]]
    assert profile["endValue"] == pytest.approx(sum(profile["weights"]))
    return {
        tuple(names[frame] for frame in sample): weight
        for sample, weight in zip(profile["samples"], profile["weights"], strict=True)
    }


def test_time_by_line(tmp_path: Path) -> None:
    whole = _written(tmp_path / "flame.json", profiled(model_nodes(), [300, 101, 7]))
    assert whole["profiles"][0]["unit"] == "nanoseconds"
    fused = "triton_poi_fused_add_gelu (one of 2 lines)"
    assert _stacks(whole) == {
        ("<module> (main.py:3)", "forward (model.py:10)", "gemm"): 300,
        ("<module> (main.py:3)", "forward (model.py:10)", fused): 50.5,
        ("<module> (main.py:3)", "forward (model.py:11)", fused): 50.5,
        ("(no source line)", "copy_kernel"): 7,
    }
    frame = next(frame for frame in whole["shared"]["frames"] if frame["name"] == "forward (model.py:10)")
    assert frame == {"name": "forward (model.py:10)", "file": "/m/model.py", "line": 10}


def test_number_of_nodes(tmp_path: Path) -> None:
    for source in (saved(model_nodes()), profiled(model_nodes(), [300, 101, 7])):
        whole = _written(tmp_path / "flame.json.gz", source, weight="nodes")
        assert whole["profiles"][0]["unit"] == "none"
        assert sum(_stacks(whole).values()) == 3
        assert whole["name"] == "flame"


def test_collapsed_stacks(tmp_path: Path) -> None:
    write_flame_graph(tmp_path / "flame.folded", profiled(model_nodes(), [300, 101, 7]))
    text = (tmp_path / "flame.folded").read_text()
    assert "<module> (main.py:3);forward (model.py:10);gemm 300\n" in text
    assert sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()) == 408
    write_flame_graph(tmp_path / "other", profiled(model_nodes(), [300, 101, 7]), format="collapsed")
    assert (tmp_path / "other").read_text() == text


def test_equal_stacks_are_one(tmp_path: Path) -> None:
    node = model_nodes()[0]
    nodes = NodeList([node, node])
    assert list(_stacks(_written(tmp_path / "f.json", saved(nodes))).values()) == [2]


def test_nothing_captured_is_an_empty_graph(tmp_path: Path) -> None:
    assert _stacks(_written(tmp_path / "f.json", saved())) == {}


def test_wrong_arguments(tmp_path: Path) -> None:
    capture = saved(model_nodes())
    with pytest.raises(ValueError, match="no times to weigh by"):
        write_flame_graph(tmp_path / "f.json", capture, weight="time")
    with pytest.raises(ValueError, match="weight must be 'time' or 'nodes', found 'size'"):
        write_flame_graph(tmp_path / "f.json", capture, weight="size")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="format must be"):
        write_flame_graph(tmp_path / "f.json", capture, format="svg")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
