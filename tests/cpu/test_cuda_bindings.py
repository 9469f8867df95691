"""Answers of cuda-bindings: what becomes a CudaError, naming the call and what it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphcap_backend.capture.cuda_nodes import _answer, _call, read_cuda_nodes
from graphcap_backend.errors import CudaError


def _absent(*arguments: Any) -> Any:
    """As cuda-bindings answers for a function that it knows and the driver does not."""
    raise RuntimeError('Function "cuGraphNodeGetToolsId" not found')


class _Result(int):
    name = "CUDA_ERROR_INVALID_VALUE"


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (SimpleNamespace(cuGraphNodeGetToolsId=_absent), r".*Function .* not found.*driver for CUDA 13\.1"),
        (SimpleNamespace(), "cuda-bindings .*pip install --upgrade cuda-bindings"),
        (SimpleNamespace(cuGraphNodeGetToolsId=lambda node: (_Result(1),)), "CUDA_ERROR_INVALID_VALUE$"),
    ],
    ids=["driver too old", "binding too old", "refused"],
)
def test_calls_that_fail_name_the_call_and_what_it_needs(driver: Any, expected: str) -> None:
    with pytest.raises(CudaError, match=f"^cuGraphNodeGetToolsId failed with {expected}") as caught:
        _call(driver, "cuGraphNodeGetToolsId", 0)
    assert caught.value.api == "cuGraphNodeGetToolsId"


def test_what_a_call_gives() -> None:
    driver = SimpleNamespace(none=lambda: (_Result(0),), one=lambda: (_Result(0), 7), two=lambda x: (_Result(0), 7, x))
    assert _call(driver, "none") == ()
    assert _call(driver, "one") == 7
    assert _call(driver, "two", 8) == (7, 8)
    assert _answer(driver, "two", 8) == (0, 7, 8)


def test_without_a_driver_reading_nodes_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    pytest.importorskip("cuda.bindings.driver")
    with pytest.raises(CudaError, match=r"^cuGraphGetNodes failed with .*driver"):
        read_cuda_nodes(0)
