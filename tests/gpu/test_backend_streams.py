"""Code that forks to a side stream inside a compiled function."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.backend_calls import assert_captured, assert_same, compiled, fresh_compiler, inputs_of, parts
from torch import Tensor


class Side:
    """A stream of its own, and memory that work on it counts in."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.counter = torch.zeros(1, device="cuda")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with fresh_compiler():
        yield


def test_a_fork_that_joins_is_captured() -> None:
    side = Side()

    @torch.library.custom_op("graphcap_tests::joined", mutates_args=())
    def joined(x: Tensor) -> Tensor:
        main = torch.cuda.current_stream()
        side.stream.wait_stream(main)
        with torch.cuda.stream(side.stream):
            doubled = x * 2
        main.wait_stream(side.stream)
        return doubled + 1

    joined.register_fake(torch.empty_like)

    def function(x: Tensor) -> Tensor:
        return joined(x.sin()).cos() + x

    fast = compiled(function, "cuda")
    for x in inputs_of("cuda", 1 << 16):
        assert_same(fast(x), (x.sin() * 2 + 1).cos() + x)
    assert_captured(fast)


def test_a_fork_left_open_is_told_and_runs_uncaptured() -> None:
    side = Side()

    @torch.library.custom_op("graphcap_tests::left_open", mutates_args=())
    def left_open(x: Tensor) -> Tensor:
        side.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side.stream):
            side.counter.add_(1)
        return x + 1

    left_open.register_fake(torch.empty_like)

    def function(x: Tensor) -> Tensor:
        return left_open(x.sin()) * 2

    fast = compiled(function, "cuda")
    calls = inputs_of("cuda", 256)
    for x in calls:
        assert_same(fast(x), (x.sin() + 1) * 2)
    torch.cuda.synchronize()
    assert side.counter.item() == len(calls)
    (part,) = parts(fast)
    assert [reason.kind for reason in part.reasons] == ["capture_failed"], str(part)
    assert "join" in str(part.reasons[0])
    with torch.cuda.stream(side.stream):
        assert torch.ones(4, device="cuda").sum().item() == 4  # the side stream works
