"""Scopes and lines of what Inductor generates, from a host capture of the backend."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launch_log import recorded

from graphcap_backend import capture_nodes, mark_kernels, report
from graphcap_backend.annotate.origins import known_wrappers
from graphcap_backend.capture.nodes import Node

BACKWARD = {"autograd_phase": "backward"}


def layer(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x).cumsum(0)


def model(x: torch.Tensor) -> torch.Tensor:
    with mark_kernels({"name": "first", "cost": {"a": 1}}):
        x = layer(x)
        with mark_kernels({"cost": {"b": 2}}):
            x = layer(x)
    with mark_kernels("second", backward=False):
        x = layer(x)
    return layer(x)


def captured(function: Any, *args: torch.Tensor, train: bool = False) -> list[list[Node]]:
    """Nodes of each graph of a compiled function."""
    compiled = torch.compile(function, backend="graphcap", fullgraph=True, options={"host_capture": True})
    for _ in range(3):
        result = compiled(*args)
        if train:
            result.sum().backward()
        del result  # a result that is held has a second graph captured
    nodes = [list(capture_nodes(g)) for g in report(compiled).graphs]
    torch._dynamo.reset()
    return nodes


@pytest.fixture(scope="module")
def trained() -> list[list[Node]]:
    return captured(model, torch.ones(4, 4, requires_grad=True), train=True)


def generated(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if "cumsum" in node.name]


def test_scopes_reach_the_kernels_made_from_what_ran_in_them(trained: list[list[Node]]) -> None:
    forward = generated(trained[0])
    assert [node.annotation for node in forward] == [
        {"name": "first", "cost": {"a": 1}},
        {"name": "first", "cost": {"a": 1, "b": 2}},
        {"name": "second"},
        None,
    ]


def test_and_their_backward_unless_it_was_not_asked_for(trained: list[list[Node]]) -> None:
    backward = [node.annotation for node in trained[-1]]
    assert {"name": "first", "cost": {"a": 1}, **BACKWARD} in backward
    assert all(annotation is None or annotation["autograd_phase"] == "backward" for annotation in backward)
    assert "second" not in str(backward)
    assert "graphcap" not in str(backward)


def test_one_function_called_four_times_is_told_apart_by_call_site(trained: list[list[Node]]) -> None:
    stacks = [(node.stack or "").splitlines() for node in generated(trained[0])]
    assert {stack[0].rpartition(":")[2] for stack in stacks} == {"layer"}
    callers = [next(line for line in stack if line.endswith(":model")) for stack in stacks]
    assert len(set(callers)) == 4
    assert all(any(line.endswith(":captured") for line in stack) for stack in stacks)


def test_backward_kernels_name_the_forward_s_lines(trained: list[list[Node]]) -> None:
    for node in trained[-1]:
        assert node.sources, node
        assert all(source.rpartition(":")[2] in ("layer", "model") for source in node.sources), node


def test_a_kernel_fused_from_two_scopes_carries_both() -> None:
    def fused(x: torch.Tensor) -> torch.Tensor:
        with mark_kernels("a"):
            x = x.sin()
        with mark_kernels("b"):
            return x.cos()

    (node,) = captured(fused, torch.ones(4))[0]
    assert node.annotation is not None
    assert {scope["name"] for scope in node.annotation["fused"]} == {"a", "b"}
    assert len(node.sources) == 2


def test_scopes_change_neither_the_graph_nor_the_kernels() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum(0).cos()

    def scoped(x: torch.Tensor) -> torch.Tensor:
        with mark_kernels("a"):
            x = x.sin().sum(0)
        with mark_kernels("b"):
            return x.cos()

    names = [[node.name for node in captured(function, torch.ones(4, 4))[0]] for function in (plain, scoped)]
    assert names[0] == names[1]


def test_lines_survive_a_reset_and_a_deleted_compiled_function() -> None:
    def kept(x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    compiled = torch.compile(kept, backend="graphcap", options={"host_capture": True})
    for _ in range(3):
        compiled(torch.ones(3, 3))
    (g,) = report(compiled).graphs
    torch._dynamo.reset()
    gc.collect()
    (node,) = generated(list(capture_nodes(g)))
    assert (node.stack or "").splitlines()[0].endswith(":layer")


def test_origins_die_with_the_compiled_function() -> None:
    def short_lived(x: torch.Tensor) -> torch.Tensor:
        return x.exp().cumsum(0)

    before = set(known_wrappers())
    captured(short_lived, torch.ones(3))
    gc.collect()
    assert set(known_wrappers()) <= before


def test_a_capture_by_hand_of_a_compiled_function_sees_its_scopes_without_stacks() -> None:
    from graphcap_backend.annotate.config import AnnotationConfig

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        with mark_kernels("traced"):
            return torch.mm(x, x)

    compiled = torch.compile(by_hand, backend="graphcap")
    x = torch.ones(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs uncaptured on a CPU
        compiled(x)
    with recorded(AnnotationConfig()) as run, mark_kernels({"outer": 1}):
        compiled(x)
    assert run.named("mm") == {"outer": 1, "name": "traced"}
    assert run.record.stack(0) is None
    torch._dynamo.reset()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with mark_kernels("attention"):
        weights = torch.matmul(q, k.transpose(-2, -1)).div(4.0).softmax(dim=-1)
        mixed = weights.matmul(v)
    return torch.relu(mixed)


def test_what_a_pattern_of_inductor_puts_in_has_the_scope_and_a_line_of_what_it_replaced() -> None:
    inputs = [torch.ones(2, 4, 16, 16, requires_grad=True) for _ in range(3)]
    graphs = captured(attention, *inputs, train=True)
    first = attention.__code__.co_firstlineno
    for nodes, phase in zip(graphs, ({}, BACKWARD), strict=True):
        (node,) = (node for node in nodes if node.name.startswith("aten._scaled_dot_product"))
        assert node.annotation == {"name": "attention", **phase}
        assert any(f"{__file__}:{first + line}:attention" in node.sources for line in (2, 3)), node


PROGRAM = """
import torch
from graphcap_backend import capture_nodes, mark_kernels, report

def f(x):
    with mark_kernels({"name": "a", "backward": {"k": 1}}):
        return x.sin().cumsum(0)

compiled = torch.compile(f, backend="graphcap", fullgraph=True, options={"host_capture": True})
x = torch.ones(8, requires_grad=True)
for _ in range(3):
    compiled(x).sum().backward()
for g in report(compiled).graphs:
    for node in capture_nodes(g):
        print(node.name, node.annotation, [source.rpartition(":")[2] for source in node.sources])
from torch._dynamo.utils import counters
print("hits", counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_cached_compiles_keep_scopes_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    printed = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(path)],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    assert printed[0][:-1] == printed[1][:-1]
    assert "'name': 'a'" in printed[0][0]
    assert printed[0][-1] == "hits 0"
    assert printed[1][-1] != "hits 0"


class Histogram(torch.nn.Module):
    """Inductor leaves its sum to ``aten.scatter_reduce_``, and writes no handle beside that call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with mark_kernels("binned"):
            return torch.zeros(4).scatter_add(0, torch.arange(16) % 4, x)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """With one thread Inductor makes kernels of such sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_call_without_a_handle_keeps_line_module_and_scope() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Flatten(0), Histogram())
    compiled = torch.compile(model, backend="graphcap", options={"host_capture": True})
    with torch.no_grad():
        for _ in range(2):
            compiled(torch.ones(1, 16))
    (node,) = (node for node in capture_nodes(report(compiled).graphs[0]) if "aten.scatter" in node.name)
    line = Histogram.forward.__code__.co_firstlineno + 2
    assert node.sources == (f"{__file__}:{line}:forward",)
    assert node.modules == ("2",)
    assert node.annotation == {"name": "binned"}
    assert (node.stack or "").splitlines()[0] == f"{__file__}:{line}:forward"
    assert "graphcap " not in (node.stack or "")


@pytest.mark.usefixtures("two_threads")
def test_a_call_without_a_handle_of_a_module_of_torch_s_own_has_no_line_but_its_module() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.MaxPool2d(2))
    compiled = torch.compile(model, backend="graphcap", options={"host_capture": True})
    for _ in range(3):
        compiled(torch.ones(2, 3, 16, 16)).sum().backward()
    nodes = [node for graph in report(compiled).graphs for node in capture_nodes(graph)]
    (node,) = (node for node in nodes if "aten.scatter" in node.name)
    assert (node.sources, node.modules) == ((), ("1",))
    assert all("graphcap " not in text for each in nodes for text in (*each.sources, each.stack or ""))
