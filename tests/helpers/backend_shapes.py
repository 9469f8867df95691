"""Scenarios: sizes that change, the cap on graphs, what cannot be captured and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.backend_calls import assert_captured, assert_same, compare, compiled, eager_and_compiled, parts
from torch import Tensor, nn

from graphcap_backend import capture_nodes, report
from graphcap_backend.errors import SkippedError


def pooled(x: Tensor) -> Tensor:
    return (x * 2 + 1).sum(1) + x.shape[0]


@contextmanager
def messages() -> Iterator[list[str]]:
    """What the backend logs meanwhile."""
    seen: list[str] = []

    class Taker(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger, taker = logging.getLogger("graphcap_backend"), Taker(logging.WARNING)
    logger.addHandler(taker)
    try:
        yield seen
    finally:
        logger.removeHandler(taker)


def sized(device: str, *sizes: int) -> list[list[Tensor]]:
    return [[torch.randn(size, 3, device=device)] for size in sizes]


def check_few_sizes(device: str) -> None:
    sizes = [2, 4, 2, 7, 4, 2, 7, 7, 2, 4, 1, 0, 1, 0, 1] * 2
    for dynamic in (None, True, False):
        torch._dynamo.reset()
        fast = compare(pooled, device, sized(device, *sizes), dynamic=dynamic)
        assert {part.state for part in parts(fast)} <= {"captured", "warm"}
        assert all(set(part.fallbacks) == {"warm_up"} for part in parts(fast))
        assert sum(part.num_replays for part in parts(fast)) >= 20


def check_sizes_kept_and_mixed(device: str) -> None:
    fast = compiled(pooled, device, dynamic=True)
    calls = sized(device, *[2, 3, 2, 4, 3, 2, 2, 4, 4, 3, 2, 3] * 2)
    results = [fast(*call) for call in calls]
    assert_same(results, [pooled(*call) for call in calls])


def check_dynamic_strides(device: str) -> None:
    fast = compiled(pooled, device, dynamic=True)
    for size in [3, 5, 3, 5, 4, 3, 5, 4] * 2:
        for x in (torch.randn(size, 6, device=device), torch.randn(6, size, device=device).t()):
            assert_same(fast(x), pooled(x))
            assert_same(fast(x[:, ::2]), pooled(x[:, ::2]))


def check_marked_dynamic_in_training(device: str) -> None:
    model, fast = eager_and_compiled(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), device)
    for size in [4, 2, 4, 2, 6, 4, 2, 6, 6, 4] * 2:
        x = torch.randn(size, 3, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        losses = []
        for m in (model, fast):
            m.zero_grad()
            loss = m(x).square().sum()
            loss.backward()
            losses.append(loss.detach().clone())
        assert_same(losses[1], losses[0])
        assert_same([p.grad for p in fast.parameters()], [p.grad for p in model.parameters()])
    assert {part.kind for part in parts(fast)} == {"forward", "backward"}
    assert_captured(fast)


def check_unbacked_sizes(device: str) -> None:
    def chosen(x: Tensor) -> Tensor:
        return x[x > 0] * 2

    def repeated(x: Tensor, n: Tensor) -> Tensor:
        count = n.item()
        torch._check(count >= 0)
        torch._check(count < 10)
        return x.new_ones(count).sum() + x

    patches = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(patches):
        compare(chosen, device, [[torch.randn(8, device=device)] for _ in range(6)])
        compare(repeated, device, [[torch.ones(2, device=device), torch.tensor(i, device=device)] for i in range(6)])


def check_work_that_cannot_be_captured(device: str) -> None:
    def masked(x: Tensor) -> Tensor:
        return x[x > 0].sum() + 1

    def item(x: Tensor) -> Tensor:
        return x * x.sum().item()

    def nonzero(x: Tensor) -> Tensor:
        return (x > 0).nonzero().sum() * 2

    for function in (masked, item, nonzero):
        torch._dynamo.reset()
        with messages() as seen:
            compare(function, device, [[torch.randn(9, device=device)] for _ in range(8)])
        assert seen == []  # Dynamo breaks the graph round them: what is left is captured
        torch._dynamo.reset()
        patches = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
        with torch._dynamo.config.patch(patches), messages() as seen:
            fast = compare(function, device, [[torch.randn(9, device=device)] for _ in range(8)])
        if device == "cpu" and function is not item:  # Inductor keeps the item in a buffer
            assert len(seen) == 1, seen
            assert "backend_shapes.py" in seen[0]
            (part,) = parts(fast)
            assert part.state == "refused"
            assert part.reasons[0].kind == "capture_failed"
            assert part.num_replays == 0


def check_growing_length_is_bounded(device: str) -> None:
    def decode(cache: Tensor) -> Tensor:
        return (cache * 2).sum(0)

    with messages() as seen:
        fast = compiled(decode, device, dynamic=True, max_graphs=4)
        for length in range(2, 20):
            cache = torch.randn(length, 3, device=device)
            for _ in range(2):
                assert_same(fast(cache), decode(cache))
    part = parts(fast)[-1]
    assert len(part.graphs) <= 4
    assert part.num_keys <= 4
    assert len(seen) == 1, seen
    assert "backend_shapes.py" in seen[0]
    assert "max_graphs" in seen[0]
    assert part.fallbacks["too_many_shapes"] > 0


def check_sizes_called_once_are_never_captured(device: str) -> None:
    with messages() as seen:
        fast = compare(pooled, device, sized(device, *range(4, 40)), dynamic=True, max_graphs=4)
    part = parts(fast)[-1]
    assert (len(part.graphs), part.state) == (0, "warm")
    assert [reason.kind for reason in part.reasons] == ["too_many_shapes"]
    assert len(seen) == 1
    assert "when it comes the second time" in seen[0]


def check_least_recently_used_graph_goes(device: str) -> None:
    fast = compiled(pooled, device, dynamic=True, max_graphs=2)

    def call(size: int) -> None:
        (x,) = sized(device, size)[0]
        assert_same(fast(x), pooled(x))

    for size in (6, 6, 6, 4, 4, 4, 6, 5, 5):  # 4 is the least recently used
        call(size)
    replays = parts(fast)[0].num_replays
    call(6)
    assert parts(fast)[0].num_replays == replays + 1
    call(4)  # captured anew
    call(4)
    assert len(parts(fast)[0].graphs) == 2


def check_capture_sizes(device: str) -> None:
    fast = compiled(pooled, device, capture_sizes=(4, 8))
    with messages() as seen:
        for call in sized(device, *[4, 5, 8] * 4):
            torch._dynamo.mark_dynamic(call[0], 0)
            assert_same(fast(*call), pooled(*call))
    (part,) = parts(fast)
    assert part.num_keys == 2
    assert part.fallbacks == {"size_not_listed": 4, "warm_up": 2}
    assert seen == []


def check_combinations_of_capture_sizes(device: str) -> None:
    def flat(x: Tensor) -> Tensor:
        return x.reshape(-1).sin() * x.shape[1]

    calls = [[torch.randn(*shape, device=device)] for shape in [(8, 12), (4, 12), (8, 6), (12, 8)] * 3]
    fast = compare(flat, device, calls, dynamic=True, capture_sizes=((8, 12), (4, 20)))
    (part,) = parts(fast)
    assert part.num_keys == 2  # (8, 12) and (12, 8)
    assert part.fallbacks == {"size_not_listed": 6, "warm_up": 2}
    (reason,) = part.reasons
    assert reason.kind == "size_not_listed"
    assert "(4, 12)" in str(reason) or "(12, 4)" in str(reason)  # Inductor orders them


def check_capture_sizes_in_training(device: str) -> None:
    """A backward is given products of sizes, which nobody has to list."""
    layers = nn.Sequential(nn.Embedding(50, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True))
    for sizes in ((8, 12), ((8, 12),)):
        torch._dynamo.reset()
        model, fast = eager_and_compiled(layers, device, dynamic=True, capture_sizes=sizes)
        for shape in [(8, 12), (4, 12), (8, 12), (8, 12), (8, 12)]:
            tokens = torch.randint(50, shape, device=device)
            for m in (model, fast):
                m.zero_grad()
                m(tokens).sin().sum().backward()
            got, expected = ([p.grad for p in m.parameters()] for m in (fast, model))
            assert_same(got, expected, rtol=1e-3, atol=1e-4)  # sums that nearly cancel
        assert {part.kind for part in parts(fast)} == {"forward", "backward"}
        for part in parts(fast):
            assert part.num_replays > 0
            assert set(part.fallbacks) == {"size_not_listed", "warm_up"}
            assert part.fallbacks["size_not_listed"] == 1


def check_on_skip(device: str) -> None:
    def refused(x: Tensor) -> Tensor:
        return x[x > 0].sum() + 1

    x = torch.randn(6, device=device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with messages() as seen:
            fast = compiled(refused, device, on_skip="ignore")
            for _ in range(4):
                assert_same(fast(x), refused(x))
        assert seen == []
        if device == "cpu":
            assert parts(fast)[0].reasons
            torch._dynamo.reset()
            fast = compiled(refused, device, on_skip="error")
            assert_same(fast(x), refused(x))
            for _ in range(3):
                with pytest.raises(SkippedError, match=r"backend_shapes\.py"):
                    fast(x)
            assert parts(fast)[0].fallbacks == {"warm_up": 1}


def check_on_skip_error_without_a_refusal(device: str) -> None:
    fast = compiled(pooled, device, on_skip="error", dynamic=True)
    calls = sized(device, *[4, 5] * 6)
    held = [fast(*call) for call in calls]  # every result in use
    assert_same(held, [pooled(*call) for call in calls])
    assert_captured(fast)


def check_on_skip_error_at_every_call_with_overlap(device: str) -> None:
    def add_in_place(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    fast = compiled(add_in_place, device, on_skip="error")
    calls = [[torch.ones(4, device=device), torch.ones(4, device=device)] for _ in range(3)]
    for x, y in calls:
        assert_same(fast(x, y), torch.full((4,), 3.0, device=device))
    for _ in range(3):
        base = torch.ones(8, device=device)
        with pytest.raises(SkippedError, match="shares memory"):
            fast(base[:4], base[4:])
        assert base.eq(1).all()  # nothing was written
    assert parts(fast)[0].fallbacks == {"warm_up": 1}


def check_on_skip_error_at_every_new_shape_above_the_limit(device: str) -> None:
    fast = compiled(pooled, device, on_skip="error", dynamic=True, max_graphs=2)

    def call(size: int) -> None:
        (x,) = sized(device, size)[0]
        assert_same(fast(x), pooled(x))

    for size in (6, 6, 4, 4, 6, 5):
        call(size)
    for _ in range(2):
        with pytest.raises(SkippedError, match="max_graphs"):
            call(5)
        call(6)  # no graph made room
        call(4)
    assert parts(fast)[0].num_keys == 2
    assert parts(fast)[0].fallbacks == {"warm_up": 3}


def check_report_and_its_graphs(device: str) -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh() * 2

    _, fast = eager_and_compiled(Layer(3, 5), device)
    nothing = "graphcap: nothing compiled: not called yet, or Dynamo compiled none of it; fullgraph=True says why"
    assert str(report(fast)) == nothing
    for x in sized(device, *[4] * 6):
        fast(*x).sum().backward()
    found = report(fast)
    assert [(part.kind, part.state, part.num_keys) for part in found.parts] == [
        ("forward", "captured", 1),
        ("backward", "captured", 1),
    ]
    for part in found.parts:
        assert part.num_replays == 5
        assert part.fallbacks == {"warm_up": 1}
        assert part.num_bytes > 0
        assert part.num_nodes == sum(len(capture_nodes(graph)) for graph in part.graphs) > 0
        assert part.way == ("host" if device == "cpu" else part.way)
    assert list(found.graphs) == [graph for part in found.parts for graph in part.graphs]
    assert "5 replays" in str(found)
    sources = [source for node in capture_nodes(found.graphs[0]) for source in node.sources]
    assert any("backend_shapes.py" in source for source in sources), sources


def check_nothing_compiled_by_others_is_touched(device: str) -> None:
    mine = compiled(pooled, device)
    plain: Any = torch.compile(pooled)
    other: Any = torch.compile(lambda x: mine(x) + plain(x), backend="eager")
    for call in sized(device, *[3] * 6):
        (x,) = call
        assert_same(plain(x) + mine(x), pooled(x) * 2)
        assert_same(other(x), pooled(x) * 2)
    assert len(parts(mine)) >= 1
