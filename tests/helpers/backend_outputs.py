"""Scenarios: outputs that callers hold, in every form, while later calls run."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from helpers.backend_calls import assert_captured, assert_same, compare, compiled, inputs_of, kept, parts
from torch import Tensor


def scaled(x: Tensor) -> Tensor:
    return (x * 2 + 1) * x.flip(0)  # the same bits, fused or not


def check_results_dropped_in_a_loop(device: str) -> None:
    fast = compare(scaled, device, [[x] for x in inputs_of(device, 4, 3)])
    assert_captured(fast, graphs=1, replays=5)


def check_result_of_the_last_call_is_held_in_a_loop(device: str) -> None:
    fast = compiled(scaled, device)
    y = last = None
    for x in inputs_of(device, 4, 3, calls=12):
        y = fast(x)
        assert_same(y, scaled(x))
        if last is not None:
            assert_same(*last)  # the result before, still held
        last = (y, kept(y))
    assert_captured(fast)
    # `y` and the pair hold two results while the next is made: two aliasing instances and one that copies at most.
    assert len(parts(fast)[0].graphs) <= 3


def check_plain_loop_takes_two_instances_and_no_copies(device: str) -> None:
    fast = compiled(scaled, device)
    addresses = []
    for x in inputs_of(device, 4, 3, calls=12):
        y = fast(x)
        addresses.append(y.data_ptr())
        assert_same(y, scaled(x))
    assert_captured(fast, graphs=2, replays=11)
    assert len(set(addresses[1:])) == 2


def check_all_results_kept(device: str) -> None:
    fast = compiled(scaled, device)
    results = []
    inputs = inputs_of(device, 4, 3, calls=12)
    for x in inputs:
        results.append(fast(x))
    assert_same(results, [scaled(x) for x in inputs])
    assert len({y.data_ptr() for y in results}) == 12
    assert_captured(fast, graphs=3, replays=11)
    expected = kept(results[2:])
    del results[:2]
    for x in inputs_of(device, 4, 3):  # aliases become free again, and are found
        assert_same(fast(x), scaled(x))
    assert_same(results, expected)


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda y: y[1],
    "transposed": lambda y: y.t(),
    "other_dtype": lambda y: y.view(torch.int32),
    "detached": lambda y: y.detach(),
    "storage": lambda y: y.untyped_storage(),
    "expanded": lambda y: y[:1].expand(8, 3),
    "diagonal": lambda y: y.diagonal(),
    "dlpack": lambda y: torch.utils.dlpack.to_dlpack(y),
    "graph_of_a_product": lambda y: (y * torch.ones_like(y, requires_grad=True)).sum(),
    "dictionary": lambda y: {"deep": [(y,)]},
    "closure": lambda y: lambda: y,
    "cycle": lambda y: _in_a_cycle(y),
}


def _in_a_cycle(y: Tensor) -> list[Any]:
    cycle: list[Any] = [y]
    cycle.append(cycle)
    return cycle


def _read(holder: Any) -> Any:
    """The values behind a holder."""
    if isinstance(holder, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.float32, device=holder.device).set_(holder)
    if isinstance(holder, dict):
        return holder["deep"][0][0]
    if isinstance(holder, list):
        return holder[0]
    if isinstance(holder, Tensor) and holder.requires_grad:
        product = holder.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        return product._saved_self if product._saved_self is not None else product._saved_other  # type: ignore[union-attr]
    if callable(holder):
        return holder()
    if type(holder).__name__ == "PyCapsule":
        return torch.utils.dlpack.from_dlpack(holder)
    return holder


def check_every_kind_of_holder_keeps_its_values(device: str) -> None:
    fast = compiled(scaled, device)
    for name, hold in HOLDERS.items():
        inputs = inputs_of(device, 4, 3)
        held = []
        for x in inputs:
            held.append(hold(fast(x)))
        for x, holder in zip(inputs, held, strict=True):
            got, expected = _read(holder), _read(hold(scaled(x)))
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"held as {name}: {text}")
        del held, holder, got
        gc.collect()
    assert_captured(fast)


def check_result_saved_by_autograd(device: str) -> None:
    fast = compiled(scaled, device)
    weight = torch.ones(4, 3, device=device, requires_grad=True)
    inputs = inputs_of(device, 4, 3)
    losses = []
    for x in inputs:
        losses.append((fast(x) * weight).sum())
    for x, loss in zip(inputs, losses, strict=True):
        (gradient,) = torch.autograd.grad(loss, weight)
        assert_same(gradient, scaled(x))


def check_result_held_by_another_thread(device: str) -> None:
    fast = compiled(scaled, device)
    inputs = inputs_of(device, 4, 3)
    go, results, seen = threading.Event(), [], []

    def keep() -> None:
        mine = results.pop()
        ready.set()
        assert go.wait(60)
        seen.append(kept(mine))

    for i, x in enumerate(inputs[:4]):
        ready = threading.Event()
        results.append(fast(x))
        thread = threading.Thread(target=keep)
        go.clear()
        thread.start()
        assert ready.wait(60)
        fast(inputs[i + 1])
        fast(inputs[i + 2])
        go.set()
        thread.join()
        assert_same(seen[-1], scaled(x))


def check_chains_from_the_first_call(device: str) -> None:
    def other(x: Tensor) -> Tensor:
        return (x - 3).sigmoid()

    f, g = compiled(scaled, device), compiled(other, device)
    for x in inputs_of(device, 4, 3):
        assert_same(f(f(x)), scaled(scaled(x)))
        assert_same(g(f(x)), other(scaled(x)))
        assert_same(f(f(f(x))), scaled(scaled(scaled(x))))
        assert_same(f(g(x)) + f(x), scaled(other(x)) + scaled(x))
    assert_captured(f)
    assert_captured(g)


def check_output_fed_back_as_input(device: str) -> None:
    def step(x: Tensor) -> Tensor:
        return (x * 1.25).sin() + 0.1

    fast = compiled(step, device)
    got = expected = torch.randn(5, device=device)
    for _ in range(12):
        got, expected = fast(got), step(expected)
        assert_same(got, expected)
    assert_captured(fast)


def check_graph_break_in_the_middle(device: str) -> None:
    def broken(x: Tensor) -> Tensor:
        y = (x + 1).relu()
        torch._dynamo.graph_break()
        z = y * x
        torch._dynamo.graph_break()
        return z + y

    fast = compare(broken, device, [[x] for x in inputs_of(device, 4, 3)])
    assert len(parts(fast)) == 3
    assert_captured(fast)


def check_input_returned_beside_a_new_tensor(device: str) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x + 1

    fast, source = compiled(both, device), compiled(scaled, device)
    for i, x in enumerate(inputs_of(device, 4, 3)):
        given = source(x)
        same, more = fast(given)
        expected = kept(given)
        assert_same(more, expected + 1)
        assert same.data_ptr() == given.data_ptr()
        same.fill_(i)
        assert_same(given, torch.full_like(expected, i))
        assert_same(more, expected + 1)


def check_view_of_an_input_returned(device: str) -> None:
    def view(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.t()[1:], x.view(-1)[3:7], x.sum(0)

    fast, source = compiled(view, device), compiled(scaled, device)
    for i, x in enumerate(inputs_of(device, 4, 3)):
        given = source(x) if i % 2 else x
        expected = view(kept(given))
        got = fast(given)
        assert_same(got, expected)
        got[0].fill_(i)
        assert_same(given[:, 1:], torch.full_like(given[:, 1:], i))
        assert_same(got[2], expected[2])


def check_outputs_that_alias_each_other(device: str) -> None:
    def aliases(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = x * 2
        return y, y[1:], y.t(), y

    fast = compiled(aliases, device)
    results = []
    for i, x in enumerate(inputs_of(device, 4, 3)):
        got, expected = fast(x), aliases(x)
        assert_same(got, expected)
        got[1].fill_(i)
        expected[1].fill_(i)
        assert_same(got, expected)
        results.append((got, expected))  # kept: the later ones are copies
    for got, expected in results:
        assert_same(got, expected)
        assert got[0].data_ptr() == got[3].data_ptr() == got[2].data_ptr()


def check_odd_outputs(device: str) -> None:
    def odd(x: Tensor) -> dict[str, Any]:
        y = x * 2
        return {
            "none": None,
            "int": 3,
            "shape": x.shape[0],
            "empty": y[:0],
            "expanded": x.sum().expand(3, 4),
            "strided": y[::2, ::2],
            "transposed": y.t().contiguous().t(),
            "bool": y > 0,
            "scalar": y.sum(),
            "double": y.double(),
            "constant": torch.arange(3, device=x.device),
        }

    fast = compiled(odd, device)
    results = []
    for x in inputs_of(device, 4, 6):
        got = fast(x)
        assert_same(got, odd(x))
        expected = odd(x)
        assert _strides(got) == _strides(expected)
        results.append((got, expected))
    for got, expected in results:
        assert_same(got, expected)


def _strides(values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: value.stride() for name, value in values.items() if isinstance(value, Tensor)}


def check_complex_outputs(device: str) -> None:
    def rotated(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = torch.complex(x, x + 1) * 2
        return z, z.conj(), z.imag

    fast = compiled(rotated, device)
    inputs, results = inputs_of(device, 4), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor has no kernels for complex numbers, and says so
        results = [fast(x) for x in inputs]
    assert_same(results, [rotated(x) for x in inputs])


def check_written_outputs_do_not_reach_later_calls(device: str) -> None:
    def constants(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros(3, device=x.device), x + 1, torch.tensor([1.0, 2.0], device=x.device)

    fast = compiled(constants, device)
    for i, x in enumerate(inputs_of(device, 3)):
        got = fast(x)
        assert_same(got, constants(x))
        for y in got:
            y.fill_(i + 7)


def check_parameter_and_buffer_returned(device: str) -> None:
    class Stateful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            self.count.add_(1)
            return x * self.weight, self.weight, self.count, self.count[1:]

    model = Stateful().to(device)
    fast = compiled(model, device)
    with torch.no_grad():
        for i, x in enumerate(inputs_of(device, 3)):
            y, weight, count, tail = fast(x)
            assert_same(y, x)
            assert weight.data_ptr() == model.weight.data_ptr()
            assert count.data_ptr() == model.count.data_ptr()
            assert count.tolist() == [i + 1] * 3
            tail.add_(0)
            assert tail.data_ptr() == model.count[1:].data_ptr()


def check_results_outlive_the_compiled_function(device: str) -> None:
    fast = compiled(scaled, device)
    inputs = inputs_of(device, 4, 3)
    results = [fast(x) for x in inputs]
    del fast
    torch._dynamo.reset()
    gc.collect()
    again = compiled(scaled, device)
    for x in inputs_of(device, 4, 3):
        again(x)
        torch.empty(4, 3, device=device).fill_(9)
    assert_same(results, [scaled(x) for x in inputs])


def check_two_functions_share_the_pool(device: str) -> None:
    def big(x: Tensor) -> Tensor:
        y = x.repeat(64, 1) + 1
        return (y @ y.t()).sum(0)[:3] + y.cumsum(0)[-1].sum()

    f, g = compiled(scaled, device), compiled(big, device)
    held: list[tuple[Tensor, Tensor]] = []
    for x in inputs_of(device, 4, 3, calls=10):
        assert_same(g(x), big(x), rtol=1e-4, atol=1e-3)
        held.append((f(x), scaled(x)))
        got = g(x)
        for mine, expected in held:
            assert_same(mine, expected)
        assert_same(got, big(x), rtol=1e-4, atol=1e-3)
        if len(held) > 2:
            held.pop(0)
    assert_captured(f)
    assert_captured(g)


def check_results_that_their_callers_resize(device: str) -> None:
    """A larger result, an empty one, memory that is gone: later calls are right, and replayed."""
    fast = compiled(scaled, device)
    resizes: list[Callable[[Tensor], Any]] = [
        lambda y: y.resize_(64).fill_(7),
        lambda y: y.untyped_storage().resize_(0),
        lambda y: torch.ones(64, device=device, out=y),
    ]
    for number, x in enumerate(inputs_of(device, 4, calls=18)):
        y = fast(x)
        assert_same(y, scaled(x))
        if number % 3 == 2:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch would rather have an empty tensor given as out=
                resizes[number // 3 % 3](y)
    assert parts(fast)[0].fallbacks == {"warm_up": 1}
