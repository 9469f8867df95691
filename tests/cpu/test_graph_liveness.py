"""check_input_liveness: what counts as an input, and when it counts as gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from graphcap_backend import HostGraph, InputLivenessError, graph
from graphcap_backend.capture.session import CaptureSession


def _watched(use: Callable[[Tensor], object], x: Tensor) -> HostGraph:
    g = HostGraph()
    with graph(g, check_input_liveness=True):
        use(x)
    return g


def test_freed_input_is_told_with_where_it_was_used_and_freed() -> None:
    x = torch.ones(8)
    g = _watched(lambda t: t * 2, x)
    g.replay()
    del x  # freed here
    with pytest.raises(InputLivenessError, match=r"float32 tensor of shape \(8,\) on cpu") as raised:
        g.replay()
    text = str(raised.value)
    used, freed = text.split("first used in the capture:")[1].split("freed:")
    assert "<lambda>" in used.splitlines()[1]
    assert freed.splitlines()[1].endswith("test_freed_input_is_told_with_where_it_was_used_and_freed")
    with pytest.raises(InputLivenessError):
        g.replay()


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t[2:5] + 1,
        lambda t: t.view(2, 4).t().neg(),
        lambda t: t.add_(1),
        lambda t: torch.add(torch.ones(8), 1, out=t),
        lambda t: torch.cat([torch.zeros(1), t]),
        lambda t: t.detach().relu(),
    ],
    ids=["slice", "view of a view", "in place", "out", "in a list", "detached"],
)
def test_every_way_to_use_memory_counts(use: Callable[[Tensor], object]) -> None:
    x = torch.ones(8)
    g = _watched(use, x)
    g.replay()
    del x
    with pytest.raises(InputLivenessError, match="1 tensor"):
        g.replay()


@pytest.mark.parametrize(
    "use",
    [lambda t: t.view(2, 4), lambda t: t.shape, lambda t: torch.empty_like(t), lambda t: t.detach()],
    ids=["view", "shape", "empty_like", "detach"],
)
def test_operations_that_launch_nothing_do_not_count(use: Callable[[Tensor], object]) -> None:
    x, y = torch.ones(8), torch.ones(8)
    g = _watched(lambda t: (use(t), y + 1), x)
    del x
    g.replay()


def test_a_view_kept_alive_keeps_the_input() -> None:
    x = torch.ones(8)
    kept = x[3:]
    g = _watched(lambda t: t + 1, x)
    del x
    g.replay()
    del kept
    with pytest.raises(InputLivenessError):
        g.replay()


def test_a_new_tensor_does_not_revive_a_dead_one() -> None:
    x = torch.ones(8)
    g = _watched(lambda t: t + 1, x)
    del x
    others = [torch.ones(8) for _ in range(64)]
    with pytest.raises(InputLivenessError):
        g.replay()
    del others


def test_memory_swapped_under_a_tensor_counts_as_gone() -> None:
    x = torch.ones(8)
    g = _watched(lambda t: t + 1, x)
    x.data = torch.zeros(8)
    with pytest.raises(InputLivenessError):
        g.replay()


def test_what_is_born_inside_is_no_input() -> None:
    x = torch.ones(8)
    g = _watched(lambda t: ((t + 1) * 2).relu_(), x)
    gc.collect()
    g.replay()


def test_every_dead_input_is_counted_and_five_are_named() -> None:
    xs = [torch.ones(i + 1) for i in range(7)]
    g = HostGraph()
    with graph(g, check_input_liveness=True):
        for x in xs:
            x.add_(1)
    del xs, x
    with pytest.raises(InputLivenessError, match=r"(?s)7 tensor.*and 2 more"):
        g.replay()


def test_inputs_of_a_compiled_region_count() -> None:
    compiled = torch.compile(lambda t, u: (t * u).relu())
    x, y = torch.ones(8), torch.ones(8)
    compiled(x, y)
    g = HostGraph()
    with graph(g, check_input_liveness=True):
        z = compiled(x, y) + 1
    g.replay()
    assert z.tolist() == [2.0] * 8
    del y
    with pytest.raises(InputLivenessError, match="1 tensor"):
        g.replay()


def test_named_inputs_count_whether_seen_or_not() -> None:
    x = torch.ones(8)
    g = HostGraph()
    with CaptureSession(g, check_input_liveness=True, liveness_inputs=[x]):
        x + 1
    del x
    with pytest.raises(InputLivenessError):
        g.replay()


def test_the_check_ends_with_its_capture() -> None:
    x = torch.ones(8)
    y = torch.ones(8)
    g = _watched(lambda t: t + 1, x)
    del x
    g.reset()
    with graph(g):
        z = y + 1
    g.replay()
    assert z.tolist() == [2.0] * 8
    assert "replay" not in vars(g)


def test_the_check_ends_when_somebody_else_captures_anew() -> None:
    x = torch.ones(8)
    y = torch.ones(8)
    g = _watched(lambda t: t + 1, x)
    del x
    g.reset()
    g.capture_begin()
    z = y + 1
    g.capture_end()
    g.replay()
    assert z.tolist() == [2.0] * 8


def test_a_watched_graph_is_not_kept_alive() -> None:
    x = torch.ones(8)
    g = _watched(lambda t: t + 1, x)
    dead = weakref.ref(g)
    del g
    assert dead() is None


def test_off_puts_nothing_on_the_graph() -> None:
    g = HostGraph()
    before = set(vars(g))
    with graph(g):
        torch.ones(2).add_(1)
    assert set(vars(g)) == before
