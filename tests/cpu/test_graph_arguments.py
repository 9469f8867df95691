"""Arguments of ``graph``: what is accepted, and that everything else is refused before anything starts."""

from __future__ import annotations

import inspect

import pytest
import torch

import graphcap_backend
from graphcap_backend import CaptureError, HostGraph, graph, graph_pool_handle


def test_parameters_are_those_of_graph_txt() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(graph).parameters.items()
        if parameter.default is not parameter.empty
    }
    assert next(iter(inspect.signature(graph).parameters)) == "cuda_graph"
    assert list(defaults.items()) == [
        ("pool", None),
        ("stream", None),
        ("capture_error_mode", "global"),
        ("enable_annotations", False),
        ("annotation_config", None),
        ("check_input_liveness", False),
    ]


def test_arguments_may_be_positional() -> None:
    g = HostGraph()
    config = {"backend": "auto"}
    with graph(g, graph_pool_handle(), None, "relaxed", True, config, True):
        torch.ones(2).add_(1)
    assert len(graphcap_backend.capture_nodes(g)) > 0


@pytest.mark.parametrize("mode", ["Global", "", None, "thread-local"])
def test_unknown_error_mode_names_the_valid_ones(mode: str) -> None:
    with pytest.raises(ValueError, match="'global', 'thread_local', 'relaxed'"):
        graph(HostGraph(), capture_error_mode=mode)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_each_error_mode_reaches_the_graph(mode: str) -> None:
    class Noting(HostGraph):
        def capture_begin(self, pool: object = None, capture_error_mode: str = "none") -> None:
            self.mode = capture_error_mode
            super().capture_begin(None, capture_error_mode)

    g = Noting()
    with graph(g, capture_error_mode=mode):
        torch.ones(2).add_(1)
    assert g.mode == mode


@pytest.mark.parametrize("pool", ["pool", 3, (1,), (1, "2"), [0, 1], True, (True, False)])
def test_wrong_pool_says_what_is_accepted(pool: object) -> None:
    with pytest.raises(TypeError, match=r"graph_pool_handle\(\).*MemPool"):
        graph(HostGraph(), pool=pool)


def test_graph_given_as_pool_is_told_about_its_method() -> None:
    with pytest.raises(TypeError, match=r"g\.pool\(\)"):
        graph(HostGraph(), pool=HostGraph())


def test_pool_of_another_graph_is_taken() -> None:
    first, second = HostGraph(), HostGraph()
    x = torch.ones(2)
    with graph(first):
        x + 1
    with graph(second, pool=first.pool()):
        x + 2
    assert second.pool() == first.pool()


def test_pool_handles_differ() -> None:
    assert graph_pool_handle() != graph_pool_handle()


def test_stream_must_be_a_stream_and_none_for_the_host() -> None:
    with pytest.raises(TypeError, match=r"torch\.cuda\.Stream"):
        graph(HostGraph(), stream=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["enable_annotations", "check_input_liveness"])
def test_flags_must_be_bool(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        graph(HostGraph(), **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("enabled", [True, False])
def test_unknown_annotation_key_is_refused_whether_used_or_not(enabled: bool) -> None:
    with pytest.raises(ValueError, match="record_py_stacks"):
        graph(HostGraph(), enable_annotations=enabled, annotation_config={"stacks": True})


def test_stacks_need_callbacks() -> None:
    with pytest.raises(ValueError, match="edge_walk"):
        graph(
            HostGraph(), enable_annotations=True, annotation_config={"backend": "edge_walk", "record_py_stacks": True}
        )


@pytest.mark.parametrize("wrong", [None, 1, object(), HostGraph])
def test_what_is_no_graph_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"torch\.cuda\.CUDAGraph.*HostGraph"):
        graph(wrong)  # type: ignore[arg-type]


def test_cuda_graph_without_cuda_names_host_graph() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    # torch itself refuses to make the object here, so one is made behind its back.
    try:
        g = object.__new__(torch.cuda.CUDAGraph)
    except TypeError:
        pytest.skip("this torch has CUDA code and makes no CUDAGraph without a driver")
    with pytest.raises(CaptureError, match=r"needs CUDA.*HostGraph"):
        graph(g)


def test_cuda_graph_class_without_cuda_is_told_the_same() -> None:
    with pytest.raises(TypeError, match="HostGraph where there is no GPU"):
        graph(torch.cuda.CUDAGraph)  # type: ignore[arg-type]


def test_nothing_happens_before_entering() -> None:
    g = HostGraph()
    graph(g)
    torch.ones(2).add_(1)
    assert len(g.nodes) == 0
