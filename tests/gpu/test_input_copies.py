"""Inputs that the graph itself copies, by nodes whose source a replay sets: they follow every call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.backend_calls import assert_same, compiled, fresh_compiler, parts

from graphcap_backend import capture_nodes, report


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with fresh_compiler(), torch.no_grad():
        yield


def _model(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x) * 2
    for number, other in enumerate(others):
        y = y + other * (number + 1)
    return y


def _num_copies(fast: Any) -> int:
    return sum(node.kind == "memcpy" for node in capture_nodes(report(fast).graphs[0]))


@pytest.mark.parametrize(("num_inputs", "num_copies"), [(1, 1), (4, 4), (5, 0), (12, 0)])
def test_few_inputs_are_copied_by_nodes(num_inputs: int, num_copies: int) -> None:
    fast = compiled(_model, "cuda")
    kept = []
    for _ in range(6):
        inputs = [torch.randn(33, 7, device="cuda") for _ in range(num_inputs)]
        kept.append(inputs)  # so that every call's are at other addresses
        assert_same(fast(*inputs), _model(*inputs))
        assert_same(fast(*inputs), _model(*inputs))
    assert _num_copies(fast) == num_copies
    assert sum(part.num_replays for part in parts(fast)) == 11


def test_the_same_memory_with_other_contents() -> None:
    fast, x = compiled(_model, "cuda"), torch.zeros(100, device="cuda")
    for number in range(6):
        x.fill_(number)
        assert_same(fast(x), _model(x))
    assert _num_copies(fast) == 1


def test_layouts_that_are_no_one_stretch_are_copied_before_the_replay() -> None:
    fast = compiled(_model, "cuda")
    for _ in range(4):
        x, expanded = torch.randn(8, 6, device="cuda").t(), torch.randn(6, 1, device="cuda").expand(6, 8)
        contiguous = torch.randn(6, 8, device="cuda")
        assert_same(fast(x, expanded, contiguous), _model(x, expanded, contiguous))
    assert _num_copies(fast) == 1


def test_a_replay_by_hand_reads_no_input_that_is_gone() -> None:
    fast = compiled(_model, "cuda")
    for _ in range(3):
        x = torch.randn(1 << 22, device="cuda")  # a segment of its own, which goes back to the driver
        y = fast(x)
    del x, y
    torch.cuda.empty_cache()
    for graph in report(fast).graphs:
        graph.replay()
        torch.cuda.synchronize()
    x = torch.randn(1 << 22, device="cuda")
    assert_same(fast(x), _model(x))


def test_instantiating_anew_changes_nothing() -> None:
    fast = compiled(_model, "cuda")
    x, first = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
    for value in (first, first, x, x):
        fast(value)
    (graph,) = report(fast).graphs
    graph.instantiate()  # its node reads ``first`` again
    assert_same(fast(x), _model(x))
    graph.instantiate()
    graph.replay()
    assert_same(fast(x), _model(x))


def test_an_input_that_is_written_to() -> None:
    def step(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5).add_(x)
        return state.sin()

    fast = compiled(step, "cuda")
    ours = [torch.ones(40, device="cuda") * number for number in range(2)]
    theirs = [state.clone() for state in ours]
    for number in range(8):
        x = torch.randn(40, device="cuda")
        assert_same(fast(ours[number % 2], x), step(theirs[number % 2], x))
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)


def test_gradients_come_in_any_form() -> None:
    with torch.enable_grad():
        w = torch.randn(8, 8, device="cuda", requires_grad=True)
        fast = compiled(lambda w: torch.sin(w) * 3, "cuda")
        forms = [
            torch.randn(8, 8, device="cuda"),
            torch.randn(8, 8, device="cuda").t(),
            torch.ones((), device="cuda").expand(8, 8),
            torch.randn(8, 8, dtype=torch.complex64, device="cuda").conj().imag,
        ]
        for gradient in forms * 2:
            assert_same(
                torch.autograd.grad(fast(w), w, gradient)[0], torch.autograd.grad(torch.sin(w) * 3, w, gradient)[0]
            )


@pytest.mark.filterwarnings("ignore:(?s).*complex:UserWarning")
def test_two_gradients_that_are_conjugated() -> None:
    def pair(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return w * 2, w * 3

    with torch.enable_grad():
        w = torch.randn(64, 3, dtype=torch.complex64, device="cuda", requires_grad=True)
        fast = compiled(pair, "cuda")
        for number in range(8):
            gradients = [torch.randn(64, 3, dtype=torch.complex64, device="cuda") for _ in range(2)]
            if number >= 4:
                gradients = [gradient.conj() for gradient in gradients]
            got, expected = (torch.autograd.grad(function(w), w, gradients)[0] for function in (fast, pair))
            assert_same(got, expected)


def test_two_gradients_that_are_negated_lazily() -> None:
    def pair(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(w) * 2, torch.sin(w) * 3

    with torch.enable_grad():
        w = torch.randn(64, 3, device="cuda", requires_grad=True)
        fast = compiled(pair, "cuda")
        gradients = [torch.randn(64, 3, device="cuda") for _ in range(2)]
        for number in range(8):
            given = [torch._neg_view(gradient) if number % 2 else gradient for gradient in gradients]
            got, expected = (torch.autograd.grad(function(w), w, given)[0] for function in (fast, pair))
            assert_same(got, expected)
