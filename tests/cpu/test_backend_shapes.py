"""Shapes, caps, skips and reports on HostGraph: the scenarios of helpers/backend_shapes.py; options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import backend_shapes
from helpers.backend_calls import Scenario, assert_captured, compiled, fresh_compiler, parts, scenario_name, scenarios

from graphcap_backend import SkippedError, report
from graphcap_backend.backend import graphcap
from graphcap_backend.options import GraphcapOptions


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


@pytest.mark.parametrize("scenario", scenarios(backend_shapes), ids=scenario_name)
def test_shapes(scenario: Scenario) -> None:
    scenario("cpu")


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"max_graph": 3}, ValueError, "max_graphs"),
        ({"host_captures": True}, ValueError, "host_capture"),
        ({"triton.cudagraph": True}, ValueError, "list_options"),
        ({"max_graphs": 0}, ValueError, "at least 1"),
        ({"max_graphs": True}, ValueError, "max_graphs"),
        ({"max_held_instances": 1.5}, ValueError, "max_held_instances"),
        ({"on_skip": "shout"}, ValueError, "'warn'"),
        ({"capture_sizes": [1, "a"]}, ValueError, "capture_sizes"),
        ({"capture_sizes": 4}, (TypeError, ValueError), "capture_sizes"),
        ({"capture_sizes": [4, (8, 128)]}, ValueError, "combinations"),
        ({"capture_sizes": [(8, 128), ()]}, ValueError, "combinations"),
        ({"capture_sizes": [(8, True)]}, ValueError, "combinations"),
        ({"capture_sizes": [-1]}, ValueError, "combinations"),
        ({"capture_sizes": "48"}, ValueError, "combinations"),
        ({"capture_sizes": ()}, ValueError, "found ()"),
        ({"capture_sizes": (0,)}, ValueError, "above 0, found (0,)"),
        ({"capture_sizes": ((8, 4), (0, 0))}, ValueError, "above 0, found ((8, 4), (0, 0))"),
        ({"host_capture": "yes"}, TypeError, "host_capture"),
        ({1: 2}, TypeError, "from names of options to values, found the key 1"),
        (["host_capture"], TypeError, "options must be a dict or GraphcapOptions, found list"),
    ],
)
def test_bad_options_name_the_valid_ones(options: dict[str, Any], error: Any, named: str) -> None:
    fast = torch.compile(lambda x: x + 1, backend=graphcap, options=options)
    with pytest.raises(Exception) as caught:
        fast(torch.ones(2))
    causes = [caught.value, caught.value.__cause__, getattr(caught.value, "inner_exception", None)]
    assert any(isinstance(cause, error) for cause in causes), repr(caught.value)
    assert named in str(caught.value)


def test_options_are_a_frozen_dataclass() -> None:
    options = GraphcapOptions(capture_sizes=[4, 8])  # type: ignore[arg-type]
    assert options.capture_sizes == (4, 8)
    assert GraphcapOptions(capture_sizes=[[4, 8], [2, 8]]).capture_sizes == ((4, 8), (2, 8))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        options.max_graphs = 3  # type: ignore[misc]


def test_an_object_of_options_will_do() -> None:
    fast = torch.compile(lambda x: x.sin() + 1, backend=graphcap, options=GraphcapOptions(host_capture=True))  # type: ignore[call-overload]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(torch.ones(3)), torch.ones(3).sin() + 1)
    assert [part.state for part in report(fast).parts] == ["captured"]


def test_what_a_mode_stands_for_and_host_capture() -> None:
    options = {**torch._inductor.list_mode_options("max-autotune"), "host_capture": True}
    fast = torch.compile(backend_shapes.pooled, backend=graphcap, options=options)
    with torch.no_grad():
        for _ in range(2):
            fast(torch.ones(3, 3))
    assert [part.state for part in report(fast).parts] == ["captured"]


def test_mode_and_inductor_options_reach_inductor() -> None:
    seen = []

    def note(graph: torch.fx.Graph) -> None:
        seen.append((torch._inductor.config.max_autotune, torch._inductor.config.epilogue_fusion))

    options = {"host_capture": True, "post_grad_custom_post_pass": note, "epilogue-fusion": False}
    fast = torch.compile(backend_shapes.pooled, backend=graphcap, options=options)
    x = torch.ones(3, 3)
    for _ in range(3):
        fast(x)
    assert seen == [(False, False)]
    assert_captured(fast)
    torch._dynamo.reset()
    fast = torch.compile(backend_shapes.pooled, backend=graphcap, mode="max-autotune-no-cudagraphs")
    fast(x)
    assert fast(x).equal(backend_shapes.pooled(x))
    assert not torch._inductor.config.max_autotune
    with pytest.raises(Exception, match="max-autotune"):
        torch.compile(lambda x: x + 2, backend=graphcap, mode="fastest")(x)


def test_on_the_cpu_without_host_capture_it_says_so_once() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    with backend_shapes.messages() as seen:
        fast = compiled(broken, "cuda")  # no host_capture
        for _ in range(3):
            assert fast(torch.ones(2)).tolist() == [4, 4]
    assert len(seen) == 1
    assert "host_capture" in seen[0]
    assert [part.state for part in parts(fast)] == ["skipped", "skipped"]


def test_on_the_cpu_without_host_capture_every_call_raises_with_on_skip_error() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    fast = compiled(broken, "cuda", on_skip="error")  # no host_capture
    for _ in range(3):
        with pytest.raises(SkippedError, match="host_capture"):
            fast(torch.ones(2))
    assert [part.state for part in report(fast).parts] == ["skipped"]


# torch before 2.14, tracing the function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_every_backward_raises_with_on_skip_error() -> None:
    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * grad[grad > 0].sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = compiled(lambda x: Masked.apply(x) + 1, "cpu", on_skip="error")
        x = torch.ones(3, requires_grad=True)
        fast(x).sum().backward()
        for _ in range(3):
            with pytest.raises(SkippedError, match="backward"):
                fast(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 3]


@pytest.mark.parametrize("thing", [lambda x: x, 3, torch.compile(lambda x: x, backend="eager")])
def test_report_of_something_else(thing: Any) -> None:
    with pytest.raises(ValueError, match=r"torch\.compile"):
        report(thing)
