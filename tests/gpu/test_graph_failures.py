"""Captures that fail on CUDA leave nothing behind, twice in a row, and the next one works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.cuda_state import device_left_as_it_was, good_capture_works, need_cuda, reserved
from helpers.faulty_graphs import FAULT_POINTS, InjectedError, faulty

from graphcap_backend import (
    CuptiError,
    NotWarmedUpError,
    UnjoinedStreamError,
    capture_nodes,
    graph,
    mark_kernels,
)
from graphcap_backend.annotate.recording import Recording

_AUTO = {"backend": "auto"}


@pytest.fixture(autouse=True)
def _device() -> None:
    need_cuda()
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # libraries are loaded from here on


def _work() -> torch.Tensor:
    """Memory, random numbers and pinned memory, so that all of it has to be undone."""
    x = torch.empty(1 << 22, device="cuda").fill_(1)
    return torch.nn.functional.dropout(x, 0.5) + 1


@pytest.mark.parametrize("annotated", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("point", FAULT_POINTS)
def test_failing_graph_methods(point: str, keep: bool, annotated: bool) -> None:
    g = faulty(torch.cuda.CUDAGraph)(keep_graph=keep)
    for _ in range(2):
        g.fail_at = point
        with device_left_as_it_was():
            with (
                pytest.raises(InjectedError, match=point),
                graph(g, enable_annotations=annotated, annotation_config=_AUTO),
                mark_kernels("lost"),
            ):
                _work()
            with pytest.raises(RuntimeError, match="reset"):
                capture_nodes(g)
    with graph(g):
        y = _work()
    g.replay()
    assert set(y.unique().tolist()) == {1.0, 3.0}
    del g, y
    good_capture_works()


@pytest.mark.parametrize("step", ["bind", "stop", "seal"])
def test_failing_recording(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(Recording, step)

    def fails(self: Recording, *args: object) -> None:
        monkeypatch.setattr(Recording, step, real)
        real(self, *args)
        raise InjectedError(step)

    for _ in range(2):
        monkeypatch.setattr(Recording, step, fails)
        with device_left_as_it_was():
            with (
                pytest.raises(InjectedError, match=step),
                graph(torch.cuda.CUDAGraph(), enable_annotations=True),
                mark_kernels("lost"),
            ):
                _work()
    good_capture_works()


def test_cupti_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphcap_backend.annotate import cupti

    def busy() -> None:
        raise CuptiError("cuptiSubscribe", "CUPTI_ERROR_INJECTED")

    monkeypatch.setattr(cupti, "acquire_callbacks", busy)
    for _ in range(2):
        with (
            device_left_as_it_was(),
            pytest.raises(CuptiError, match="INJECTED"),
            graph(torch.cuda.CUDAGraph(), enable_annotations=True, annotation_config={"backend": "cupti"}),
        ):
            pytest.fail("the block must not run")
    good_capture_works()


def _python_error() -> None:
    _work()
    raise ZeroDivisionError("mine")


def _python_error_after(work: object) -> None:
    raise ZeroDivisionError(f"after {type(work)}")


def _illegal_at_begin() -> None:
    torch.cuda.synchronize()


def _illegal_in_the_middle() -> None:
    _work().sum().item()


def _illegal_at_the_end() -> None:
    x = _work()
    x[x > 1]


@pytest.mark.parametrize("annotated", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("block", "error"),
    [
        (_python_error, ZeroDivisionError),
        (_illegal_at_begin, RuntimeError),
        (_illegal_in_the_middle, RuntimeError),
        (_illegal_at_the_end, RuntimeError),
    ],
)
def test_failing_block(block: Callable[[], None], error: type[Exception], keep: bool, annotated: bool) -> None:
    g = torch.cuda.CUDAGraph(keep_graph=keep)
    for _ in range(2):
        with device_left_as_it_was():
            with (
                pytest.raises(error),
                graph(g, enable_annotations=annotated, annotation_config=_AUTO),
                mark_kernels("lost"),
            ):
                block()
    good_capture_works()


def test_error_caught_inside_the_block_is_told_at_its_end() -> None:
    for _ in range(2):
        with device_left_as_it_was():
            with pytest.raises(RuntimeError, match="invalidated"), graph(torch.cuda.CUDAGraph()):
                with pytest.raises(RuntimeError):
                    _work().sum().item()
    good_capture_works()


def test_twenty_failures_keep_no_memory() -> None:
    before = reserved()
    for i in range(20):
        with pytest.raises(RuntimeError), graph(torch.cuda.CUDAGraph()):
            torch.empty(1 << (20 + i % 5), device="cuda").sum().item()
        assert reserved() == before


def test_stream_left_current_by_the_block() -> None:
    outside = torch.cuda.current_stream()
    x = torch.ones(4, device="cuda")
    g = torch.cuda.CUDAGraph()
    with graph(g):
        y = x + 1
        torch.cuda.set_stream(torch.cuda.Stream())
    assert torch.cuda.current_stream() == outside
    g.replay()
    assert y.tolist() == [2.0] * 4


# Forks


def _fork(side: torch.cuda.Stream, join: bool) -> torch.Tensor:
    x = torch.ones(1 << 20, device="cuda")
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2
        z = y + 1
    x.add_(1)
    if join:
        main.wait_stream(side)
    return z


@pytest.mark.parametrize("keep", [False, True])
def test_joined_fork_is_captured(keep: bool) -> None:
    g = torch.cuda.CUDAGraph(keep_graph=keep)
    with graph(g, enable_annotations=True, annotation_config=_AUTO):
        z = _fork(torch.cuda.Stream(), join=True)
    g.replay()
    assert z[0].item() == 3
    assert len(capture_nodes(g)) == 4


@pytest.mark.parametrize("keep", [False, True])
def test_unjoined_fork_says_so(keep: bool) -> None:
    side = torch.cuda.Stream()
    for _ in range(2):
        with (
            device_left_as_it_was(),
            pytest.raises(UnjoinedStreamError, match=r"(?s)wait_stream.*record_py_stacks"),
            graph(torch.cuda.CUDAGraph(keep_graph=keep)),
        ):
            _fork(side, join=False)
    good_capture_works()


@pytest.mark.parametrize("keep", [False, True])
def test_unjoined_fork_with_stacks_says_where(keep: bool) -> None:
    side = torch.cuda.Stream()
    for _ in range(2):
        with device_left_as_it_was():
            try:
                with (
                    pytest.raises(UnjoinedStreamError) as raised,
                    graph(
                        torch.cuda.CUDAGraph(keep_graph=keep),
                        enable_annotations=True,
                        annotation_config={"record_py_stacks": True},
                    ),
                ):
                    _fork(side, join=False)
            except CuptiError as error:
                pytest.skip(f"needs CUPTI: {error}")
            assert "node 2" not in str(raised.value)
            lines = str(raised.value).splitlines()
            assert "node 1" in lines[0]
            assert lines[1].endswith(":_fork")
            del raised
    good_capture_works()


def test_exception_with_a_fork_open_is_the_users() -> None:
    side = torch.cuda.Stream()
    for _ in range(2):
        with device_left_as_it_was():
            with pytest.raises(ZeroDivisionError), graph(torch.cuda.CUDAGraph()):
                _python_error_after(_fork(side, join=False))
        with torch.cuda.stream(side):
            assert torch.ones(4, device="cuda").sum().item() == 4
    good_capture_works()


# First calls


def test_compiled_function_first_called_inside() -> None:
    compiled = torch.compile(lambda t: torch.softmax(t * 2 + 1, -1))
    x = torch.randn(64, device="cuda")
    for _ in range(2):
        with (
            device_left_as_it_was(),
            pytest.raises(NotWarmedUpError, match="once before the capture"),
            graph(torch.cuda.CUDAGraph()),
        ):
            compiled(x)
    compiled(x)
    g = torch.cuda.CUDAGraph()
    with graph(g):
        y = compiled(x)
    x.copy_(torch.randn_like(x))
    g.replay()
    torch.testing.assert_close(y, torch.softmax(x * 2 + 1, -1))


def test_refused_first_call_leaves_the_capture_good() -> None:
    compiled = torch.compile(lambda t: torch.relu(t * 5))
    x = torch.ones(64, device="cuda")
    g = torch.cuda.CUDAGraph()
    with graph(g):
        y = x + 1
        with pytest.raises(Exception, match="once before the capture"):
            compiled(x)
        z = y * 2
    g.replay()
    assert z[0].item() == 4
    assert compiled(x)[0].item() == 5


def test_untuned_triton_kernel() -> None:
    triton = pytest.importorskip("triton")
    from helpers.tuned_kernel import add_one

    x, y = torch.zeros(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")

    def launch() -> None:
        add_one[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())

    for _ in range(2):
        with device_left_as_it_was(), pytest.raises(NotWarmedUpError, match="add_one"), graph(torch.cuda.CUDAGraph()):
            launch()
    launch()
    g = torch.cuda.CUDAGraph()
    with graph(g):
        launch()
    x.fill_(4)
    g.replay()
    assert y.min().item() == y.max().item() == 5
