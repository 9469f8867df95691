"""Walking edges and node callbacks give the same annotations on the same program."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from helpers.launch_log import leaf, recorded, walked
from hypothesis import given, settings
from hypothesis import strategies as st

from graphcap_backend.annotate import backward_brackets
from graphcap_backend.annotate.config import AnnotationConfig
from graphcap_backend.annotate.recording import Recording
from graphcap_backend.annotate.scopes import current_scope, mark_kernels

Program = list[Any]
"""Of: an operator's name, or (annotation, backward, program) for a scope, or "backward"."""

ANNOTATIONS = st.one_of(
    st.sampled_from(["a", "b"]),
    st.dictionaries(st.sampled_from(["name", "k"]), st.one_of(st.integers(0, 3), st.just({"x": 1})), max_size=2),
)
PROGRAMS = st.recursive(
    st.lists(st.sampled_from(["sigmoid", "tanh", "view", "no_grad", "join", "backward"]), max_size=4),
    lambda inner: st.lists(
        st.one_of(st.sampled_from(["sigmoid", "backward"]), st.tuples(ANNOTATIONS, st.booleans(), inner)), max_size=4
    ),
    max_leaves=12,
)


def run_program(program: Program, x: torch.Tensor) -> torch.Tensor:
    for step in program:
        if isinstance(step, tuple):
            annotation, passes_on, inner = step
            with mark_kernels(annotation, backward=passes_on):
                x = run_program(inner, x)
        elif step == "backward":
            x.sum().backward(retain_graph=True)
        elif step == "join":  # two gradients are summed up behind a node
            x = x + x.sin()
        elif step == "view":
            x = x.view(-1)
        elif step == "no_grad":
            with torch.no_grad():
                x.cos()
        else:
            x = getattr(x, step)()
    return x


@settings(max_examples=150, deadline=None)
@given(PROGRAMS)
def test_both_ways_agree(program: Program) -> None:
    found = []
    for way in (recorded, walked):
        with way() as run:
            run_program(program, leaf(2))
        found.append(list(zip(run.log.names, run.annotations(), strict=True)))
    assert found[0] == found[1]


def test_marks_are_linear_in_scopes_whatever_the_depth() -> None:
    readings = {}
    for depth in (1, 16):
        with walked() as run:
            scopes = [mark_kernels({"depth": level}) for level in range(depth)]
            for scope in scopes:
                scope.__enter__()
            for _ in range(100):
                torch.zeros(1)
            for scope in reversed(scopes):
                scope.__exit__(None, None, None)
        assert run.annotations() == [{"depth": depth - 1}] * 100
        readings[depth] = run
    assert math.isclose(len(readings[1].log.names), len(readings[16].log.names))


def test_the_engine_entry_is_put_back() -> None:
    engine = torch.autograd._engine_run_backward
    for _ in range(2):
        with walked():
            assert isinstance(torch.autograd._engine_run_backward, backward_brackets.Switch)
            leaf(2).sum().backward()
        assert torch.autograd._engine_run_backward is engine


def test_brackets_do_not_outlive_their_run() -> None:
    with walked(), mark_kernels("a"):
        y = leaf(2).sigmoid()
        y.sum().backward(retain_graph=True)
    assert y.grad_fn is not None
    with walked() as run:
        y.sum().backward()
    assert run.log.names.count("sigmoid_backward") == 1


def test_an_edge_walk_finds_the_lines_of_compiled_code() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w)

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with mark_kernels("traced"):
            x = layer(x, w)
        return layer(x.relu(), w)

    compiled = torch.compile(model, fullgraph=True, options={"trace.provenance_tracking_level": 1})
    x = torch.ones(3, 3)
    with torch.no_grad():
        compiled(x, x)
        with walked(AnnotationConfig(record_py_stacks=True, best_effort=True)) as run:
            x.cos()
            compiled(x, x)
            x.sin()
    stacks = dict(zip(run.log.names, map(run.record.stack, range(len(run.log.names))), strict=True))
    assert run.record.way == "edge_walk"
    assert stacks["cos"] is stacks["sin"] is None
    products = [(run.record.stack(at) or "").splitlines() for at, name in enumerate(run.log.names) if name == "mm"]
    assert [[line.rpartition(":")[2] for line in lines[:2]] for lines in products] == [["layer", "model"]] * 2
    assert products[0][1] != products[1][1]
    assert all(any(__file__ in line for line in lines[2:]) for lines in products)
    assert sys.gettrace() is None
    torch._dynamo.reset()


def test_a_failed_walk_does_not_look_at_its_graph_again() -> None:
    counted = []

    def count(_: int) -> int:
        counted.append(1)
        return 0

    recording = Recording.start_walk(AnnotationConfig(), count)
    recording.bind(1)
    counted.clear()
    for _ in range(2):
        recording.discard()
    recording.stop()
    assert counted == []
    assert current_scope() is None
    assert not isinstance(torch.autograd._engine_run_backward, backward_brackets.Switch)
