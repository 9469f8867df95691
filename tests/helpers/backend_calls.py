"""Compile with the backend for a device, and compare with eager call by call.

A scenario is a function ``check_*(device)``: "cpu" captures into a HostGraph, "cuda" into a CUDA graph. tests/cpu
and tests/gpu run the same ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from graphcap_backend import report
from graphcap_backend.backend import graphcap

CALLS = 6
"""Calls of one comparison: uncaptured, capturing, replays in turns."""

Scenario = Callable[[str], None]


def scenarios(module: ModuleType) -> list[Scenario]:
    """The scenarios that a helper module defines, in the order of its text."""
    return [value for name, value in vars(module).items() if name.startswith("check_") and callable(value)]


def scenario_name(scenario: Scenario) -> str:
    return scenario.__name__.removeprefix("check_")


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """No compiled code from, or left for, other tests; a known seed."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    try:
        yield
    finally:
        torch._dynamo.reset()


_plain: ContextVar[bool] = ContextVar("plain", default=False)


class DifferentValuesError(AssertionError):
    """Eager and compiled gave different values."""


def plain_inductor_differs(scenario: Scenario, device: str) -> bool:
    """Whether ``torch.compile`` without this backend gives other values than eager in a scenario, too."""
    token = _plain.set(True)
    try:
        with fresh_compiler():
            scenario(device)
    except DifferentValuesError:
        return True
    except Exception:  # noqa: BLE001 - it got as far as what it asks of our report, with equal values
        return False
    finally:
        _plain.reset(token)
    return False


def compiled(function: Callable[..., Any], device: str, *, dynamic: bool | None = None, **options: Any) -> Any:
    """``function`` compiled with the backend."""
    if _plain.get():
        return torch.compile(function, dynamic=dynamic)
    given = {"host_capture": device == "cpu", **options}
    return torch.compile(function, backend=graphcap, dynamic=dynamic, options=given)


def eager_and_compiled(model: torch.nn.Module, device: str, **options: Any) -> tuple[Any, Any]:
    """The model on the device, and a compiled copy of it with parameters of its own."""
    model = model.to(device)
    return model, compiled(copy.deepcopy(model), device, **options)


def inputs_of(device: str, *shape: int, calls: int = CALLS, **how: Any) -> list[Tensor]:
    """One random input for each call."""
    return [torch.randn(*shape, device=device, **how) for _ in range(calls)]


def assert_same(got: Any, expected: Any, **tolerance: Any) -> None:
    """Equal as the CPU's kernels give it; on a GPU eager and compiled kernels add up in different orders."""
    if not tolerance and any(leaf.is_cuda and leaf.dtype is torch.float32 for leaf in _tensors(tree_leaves(got))):
        tolerance = {"rtol": 1e-4, "atol": 1e-4}
    try:
        torch.testing.assert_close(got, expected, **tolerance)
    except AssertionError as error:
        raise DifferentValuesError(str(error)) from None


def kept(value: Any) -> Any:
    """The value as it is now, for comparing later."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(kept(one) for one in value)
    return value


def parts(function: Any) -> Sequence[Any]:
    """What the report tells of subgraphs that launch something."""
    return [
        part
        for part in report(function).parts
        if not any(reason.kind == "nothing_to_capture" for reason in part.reasons)
    ]


def assert_captured(function: Any, *, graphs: int | None = None, replays: int | None = None) -> None:
    """All parts are captured, and no call fell back but the first at each key."""
    found = report(function)
    assert found.parts, "nothing was compiled"
    for part in parts(function):
        assert part.state == "captured", str(found)
        assert set(part.fallbacks) <= {"warm_up"}, str(found)
        assert part.num_replays > 0, str(found)
    if graphs is not None:
        assert [len(part.graphs) for part in found.parts] == [graphs] * len(found.parts), str(found)
    if replays is not None:
        assert [part.num_replays for part in found.parts] == [replays] * len(found.parts), str(found)


def gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients of the parameters."""
    return {name: kept(parameter.grad) for name, parameter in model.named_parameters()}


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers."""
    return {name: kept(value) for name, value in model.state_dict().items()}


def compare(function: Callable[..., Any], device: str, calls: Sequence[Sequence[Any]], **options: Any) -> Any:
    """Call the compiled function once for each list of arguments; results, and arguments left behind, equal eager's.

    Every result is dropped before the next call.
    """
    fast = compiled(function, device, **options)
    for arguments in calls:
        for_eager = copy_arguments(arguments)
        expected = function(*for_eager)
        got = fast(*arguments)
        assert_same(got, expected)
        assert_same(_tensors(arguments), _tensors(for_eager))
        del got, expected
    return fast


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    return [argument for argument in arguments if isinstance(argument, Tensor)]


def copy_arguments(arguments: Sequence[Any]) -> list[Any]:
    """The same values in the same layouts, in memory of their own; arguments that share memory go on doing so."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Any] = {}
    for argument in arguments:
        if not isinstance(argument, Tensor) or id(argument) in copies:
            continue
        storage = argument.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()
        twin = torch.empty(0, dtype=argument.dtype, device=argument.device).set_(
            storages[storage._cdata], argument.storage_offset(), argument.size(), argument.stride()
        )
        if argument.is_conj():
            twin = twin.conj()
        copies[id(argument)] = twin.requires_grad_(argument.requires_grad)
    return [copies.get(id(argument), argument) for argument in arguments]
