"""Scenarios: outputs of graphs that are inputs of others, which read them where they are."""

from __future__ import annotations

import gc
from typing import Any

import torch
from helpers.backend_calls import assert_captured, assert_same, compiled, inputs_of, kept, parts
from torch import Tensor

from graphcap_backend import report
from graphcap_backend.backend import Region


def first(x: Tensor) -> Tensor:
    return (x * 2 + 1) * x.flip(0)


def second(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) * y + x.flip(0)


def reading_in_place(function: Any) -> list[bool]:
    """Of each graph of a compiled function, whether it reads an input where another graph put it."""
    graphs = report(function).graphs
    instances = [
        instance
        for region in Region.all_live
        for part in region.parts
        if part.replayed
        for family in part.replayed.families
        for instance in family.instances
    ]
    return [bool(one.in_place) for graph in graphs for one in instances if one.graph is graph]


def check_a_chain_that_drops_results(device: str) -> None:
    one, other = compiled(first, device), compiled(second, device)
    for x, y in zip(inputs_of(device, 8, 3, calls=10), inputs_of(device, 8, 3, calls=10), strict=True):
        assert_same(other(one(x), y), second(first(x), y))
    assert_captured(one, graphs=1)
    assert_captured(other, graphs=1)
    assert reading_in_place(other) == [True]
    assert reading_in_place(one) == [False]


def check_a_chain_that_holds_the_last_results(device: str) -> None:
    one, other = compiled(first, device), compiled(second, device)
    for x, y in zip(inputs_of(device, 8, 3, calls=12), inputs_of(device, 8, 3, calls=12), strict=True):
        middle = one(x)
        result = other(middle, y)
        assert_same([middle, result], [first(x), second(first(x), y)])
    assert_captured(other)
    assert reading_in_place(other) == [True, True]


def check_a_chain_that_keeps_all_results(device: str) -> None:
    one, other = compiled(first, device), compiled(second, device)
    everything, expected = [], []
    for x, y in zip(inputs_of(device, 8, 3, calls=12), inputs_of(device, 8, 3, calls=12), strict=True):
        everything.append(one(x))
        everything.append(other(everything[-1], y))
        expected += [first(x), second(first(x), y)]
    assert_same(everything, expected)
    assert_captured(other)


def check_graph_outputs_and_other_inputs_by_turns(device: str) -> None:
    one, other = compiled(first, device), compiled(second, device)
    held: list[tuple[Tensor, Tensor]] = []
    inputs = inputs_of(device, 8, 3, calls=24)
    for number, (x, y) in enumerate(zip(inputs, reversed(inputs), strict=True)):
        middle, expected = (one(x), first(x)) if number % 3 else (x.clone(), x)
        held.append((other(middle, y), second(expected, y)))
        assert_same(*zip(*held, strict=True))
        if number % 4 == 3:
            held.clear()
    assert_captured(other)


def check_a_result_fed_back(device: str) -> None:
    def step(state: Tensor, x: Tensor) -> Tensor:
        return torch.sin(state * 0.5 + x)

    fast = compiled(step, device)
    ours = theirs = torch.zeros(8, 3, device=device)
    for x in inputs_of(device, 8, 3, calls=20):
        ours, theirs = fast(ours, x), step(theirs, x)
        assert_same(ours, theirs)
    assert_captured(fast)


def check_a_graph_output_that_the_next_writes_to(device: str) -> None:
    def write(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y)
        return x.flip(0) + 1

    one, other = compiled(first, device), compiled(write, device)
    for x, y in zip(inputs_of(device, 8, 3, calls=10), inputs_of(device, 8, 3, calls=10), strict=True):
        middle, expected = one(x), first(x)
        assert_same(other(middle, y), write(expected, y))
        assert_same(middle, expected)
    assert reading_in_place(other) == [False] * len(reading_in_place(other))


def check_a_view_of_a_graph_output_comes_back(device: str) -> None:
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[2:], x * 2

    one, other = compiled(first, device), compiled(halves, device)
    last: tuple[Any, Any] | None = None
    for x in inputs_of(device, 8, 3, calls=10):
        view, doubled = other(one(x))
        expected = halves(first(x))
        assert_same((view, doubled), expected)
        if last is not None:
            assert_same(*last)  # the view is all that holds the first graph's output
        last = ((view, doubled), kept(expected))


def check_training_through_a_chain(device: str) -> None:
    w = torch.randn(3, 3, device=device, requires_grad=True)

    def tail(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    one, other = compiled(tail, device), compiled(tail, device)
    for x in inputs_of(device, 8, 3, calls=8):
        got = torch.autograd.grad(other(one(x, w), w).square().sum(), w)
        assert_same(got, torch.autograd.grad(tail(tail(x, w), w).square().sum(), w), rtol=1e-4, atol=1e-4)


def check_a_reader_that_dies_unreleased(device: str) -> None:
    """What a graph held of another's outputs counts as held no longer, or a caller's result would be overwritten."""

    def reader(x: Tensor) -> Tensor:
        return torch.sin(x) + x.flip(0)

    one, other = compiled(first, device), compiled(reader, device)
    with torch.no_grad():
        for x in inputs_of(device, 8, 3, calls=6):
            assert_same(other(one(x)), reader(first(x)))
        assert True in reading_in_place(other)
        regions = len(list(Region.all_live))
        torch._dynamo.eval_frame.remove_from_cache(reader)
        del other
        gc.collect()
        assert len(list(Region.all_live)) < regions
        held = [(one(x), first(x)) for x in inputs_of(device, 8, 3, calls=6)]
        assert_same(*zip(*held, strict=True))


def check_partitions_that_drop_results_need_one_graph_each(device: str) -> None:
    def mixed(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x + 1).relu()
        z = (y.cpu() * 2).to(x.device).sin() + y
        return y * 2 + z, y

    fast = compiled(mixed, device, graph_partition=True)
    with torch.no_grad():
        for x in inputs_of(device, 64, calls=12):
            assert_same(fast(x), mixed(x))
    found = [part for part in parts(fast) if part.state == "captured"]
    assert [len(part.graphs) for part in found] == [1] * len(found), report(fast)
