"""Backward work carries the forward's scope and line."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from helpers.launch_log import leaf, recorded, walked
from torch.utils.checkpoint import checkpoint

from graphcap_backend.annotate import node_hooks
from graphcap_backend.annotate.scopes import current_scope, mark_kernels

BACKWARD = {"autograd_phase": "backward"}
BOTH_WAYS = pytest.mark.parametrize("way", [recorded, walked])


def model_line(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid()


@BOTH_WAYS
def test_same_capture(way: Any) -> None:
    with way() as run:
        with mark_kernels("a"):
            y = leaf(2).sigmoid()
        z = y.tanh()
        z.sum().backward()
    assert run.named("sigmoid_backward") == {"name": "a", **BACKWARD}
    assert run.named("tanh_backward") is None


@BOTH_WAYS
def test_later_capture(way: Any) -> None:
    with way() as forward, mark_kernels({"layer": {"index": 1}}):
        y = leaf(2).sigmoid().sum()
    with way() as run:
        y.backward()
    assert run.named("sigmoid_backward") == {"layer": {"index": 1}, **BACKWARD}
    assert forward.named("sigmoid") == {"layer": {"index": 1}}


@BOTH_WAYS
def test_a_scope_round_backward_lies_outside_the_forwards(way: Any) -> None:
    with way() as run:
        with mark_kernels({"name": "layer", "in": "forward"}):
            y = leaf(2).sigmoid()
        z = y.tanh().sum()
        with mark_kernels({"name": "backward pass", "step": 4}):
            z.backward()
    assert run.named("sigmoid_backward") == {"name": "layer", "in": "forward", "step": 4, **BACKWARD}
    assert run.named("tanh_backward") == {"name": "backward pass", "step": 4}


@BOTH_WAYS
def test_a_scope_inside_the_backward_lies_inside(way: Any) -> None:
    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with mark_kernels({"name": "own", "own": True}):
                grad = grad.cos()
            return grad.exp()

    with way() as run:
        with mark_kernels({"name": "layer"}):
            y = Marked.apply(leaf(2))
        with mark_kernels({"name": "outer", "step": 1}):
            y.sum().backward()
    assert run.named("cos") == {"name": "own", "own": True, "step": 1, **BACKWARD}
    assert run.named("exp") == {"name": "layer", "step": 1, **BACKWARD}


@BOTH_WAYS
def test_backward_false_keeps_it_to_the_forward(way: Any) -> None:
    with way() as run:
        with mark_kernels("a", backward=False):
            y = leaf(2).sigmoid()
            with mark_kernels({"inner": 1}):
                z = y.tanh()
        z.sum().backward()
    assert run.named("sigmoid") == {"name": "a"}
    assert run.named("sigmoid_backward") is None
    # The whole dynamic scope goes along once an inner scope asks for it.
    assert run.named("tanh_backward") == {"name": "a", "inner": 1, **BACKWARD}


@BOTH_WAYS
def test_accumulation_into_leaves_never_carries_it(way: Any) -> None:
    x = leaf(2)
    x.grad = torch.ones(2)
    with way() as run:
        with mark_kernels("a"):
            y = x.sigmoid().sum()
        y.backward()
    assert run.log.names[-1] in ("add_", "add")  # into x.grad
    assert run.annotations()[-1] is None


@BOTH_WAYS
def test_a_node_that_raises_leaves_no_scope_behind(way: Any) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            grad.cos()
            raise ZeroDivisionError

    with way() as run:
        with mark_kernels("a"):
            y = Raises.apply(leaf(2)).sum()
        with pytest.raises(ZeroDivisionError):
            y.backward()
        assert current_scope() is None
        torch.zeros(1)
    assert run.named("cos") == {"name": "a", **BACKWARD}
    assert run.named("zeros") is None


@BOTH_WAYS
def test_checkpoint_recomputation(way: Any) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        with mark_kernels("block"):
            return x.sigmoid().tanh()

    with way() as run:
        y = checkpoint(block, leaf(2), use_reentrant=False)
        assert isinstance(y, torch.Tensor)
        y.sum().backward()
    assert run.named("sigmoid_backward") == {"name": "block", **BACKWARD}
    again = [at for at, name in enumerate(run.log.names) if name == "sigmoid"]
    assert len(again) == 2
    assert [run.annotations()[at]["name"] for at in again] == ["block", "block"]  # type: ignore[index]


@BOTH_WAYS
def test_higher_orders_inherit(way: Any) -> None:
    with way() as run:
        x = leaf(2)
        with mark_kernels("a"):
            y = x.sigmoid().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.sum().backward()
    assert run.log.names.count("sigmoid_backward") == 2
    for name, annotation in zip(run.log.names, run.annotations(), strict=True):
        if "sigmoid" in name:
            assert annotation is not None
            assert annotation["name"] == "a"


@pytest.mark.skipif(not node_hooks.HAS_NODE_HOOKS, reason="needs torch 2.14: autograd node-creation hooks")
def test_higher_orders_inherit_through_a_first_backward_that_was_not_captured() -> None:
    x = leaf(2)
    with recorded() as forward, mark_kernels("a"):
        y = x.sigmoid().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with recorded() as run:
        grad.sum().backward()
    assert forward.named("sigmoid") == {"name": "a"}
    assert run.named("sigmoid_backward") == {"name": "a", **BACKWARD}


def test_creation_hooks_do_not_outlive_the_backward() -> None:
    with recorded():
        with mark_kernels("a"):
            y = leaf(2).sigmoid().sum()
        y.backward()
    node = (leaf(2) * 2).grad_fn
    assert node is not None
    assert node_hooks.kept(node) is None


def test_backward_nodes_name_the_forward_line_then_the_call_of_backward() -> None:
    with recorded() as run:
        y = model_line(leaf(2)).sum()
        y.backward()
    here = "test_backward_nodes_name_the_forward_line_then_the_call_of_backward"
    assert run.lines("sigmoid_backward")[:3] == ["model_line", here, *run.lines("sigmoid_backward")[2:3]]
    assert here in run.lines("sigmoid_backward")[2:]
    (source,) = run.record.sources(run.log.names.index("sigmoid_backward"))
    assert "launch_log" in source or source.endswith(":model_line")


def test_forward_lines_reach_a_later_capture() -> None:
    with recorded() as forward:
        y = model_line(leaf(2)).sum()
    with recorded() as run:
        y.backward()
    assert forward.lines("sigmoid")[0] == "model_line"
    assert run.lines("sigmoid_backward")[0] == "model_line"


def test_a_view_that_launches_nothing_in_forward_has_its_own_line() -> None:
    def pick(x: torch.Tensor) -> torch.Tensor:
        return x[0]

    with recorded() as run:
        y = pick(leaf(2, 2).sigmoid())
        z = y.tanh().sum()
        z.backward()
    assert run.lines("select_backward")[0] == "pick"


def test_a_worker_thread_s_own_nodes_are_no_matter() -> None:
    """A backward that another thread calls, with nodes of its own, as numbers of nodes are per thread."""
    found = []

    def elsewhere(y: torch.Tensor) -> None:
        for _ in range(100):
            leaf(2).sigmoid()
        with recorded() as run:
            y.backward()
        found.append(run)

    with recorded() as forward, mark_kernels("a"):
        y = leaf(2).sigmoid().sum()
    thread = threading.Thread(target=elsewhere, args=(y,))
    thread.start()
    thread.join()
    assert forward.named("sigmoid") == {"name": "a"}
    assert found[0].named("sigmoid_backward") == {"name": "a", **BACKWARD}


def test_anomaly_mode_and_warnings_are_as_before() -> None:
    before = torch.is_anomaly_enabled(), torch.fx.traceback.format_stack, list(warnings.filters)
    for _ in range(2):
        with recorded():
            leaf(2).sigmoid()
        with pytest.raises(ZeroDivisionError), recorded():
            raise ZeroDivisionError
        assert before == (torch.is_anomaly_enabled(), torch.fx.traceback.format_stack, list(warnings.filters))


def test_the_user_s_own_anomaly_mode_keeps_its_stacks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=False), recorded():
            node = leaf(2).sigmoid().grad_fn
            assert torch.is_anomaly_enabled()
    assert node is not None
    assert any("test_the_user_s_own_anomaly_mode" in line for line in node.metadata["traceback_"])
