"""Scenarios: operators with control flow in them, and outputs of several kinds at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.backend_calls import assert_same, compiled, inputs_of
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop


def check_while_loop_with_its_state(device: str) -> None:
    """Captured or left uncaptured with a reason, but equal to eager at every call."""

    def halve(x: Tensor) -> Tensor:
        def go_on(i: Tensor, y: Tensor) -> Tensor:
            return i < 4

        def step(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, y / 2 + i

        return while_loop(go_on, step, (torch.zeros((), dtype=torch.int64, device=x.device), x))[1] + 1

    fast = compiled(halve, device)
    with torch.no_grad():
        for x in inputs_of(device, 4, 3):
            assert_same(fast(x), halve(x))


def check_scan_with_its_state(device: str) -> None:
    def running(x: Tensor) -> tuple[Tensor, Tensor]:
        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            carry = carry * 0.5 + row
            return carry, carry.sin()

        last, rows = scan(step, torch.zeros(3, device=x.device), x)
        return last * 2, rows

    with torch.no_grad():
        try:
            torch.compile(running)(torch.ones(5, 3, device=device))
            plain_error = None
        except Exception as error:  # noqa: BLE001 - some releases of torch cannot compile it
            plain_error = type(error)
        torch._dynamo.reset()
        fast = compiled(running, device)
        for x in inputs_of(device, 5, 3):
            if plain_error is None:
                assert_same(fast(x), running(x))
            else:
                with pytest.raises(plain_error):
                    fast(x)


def check_tensor_and_int_with_two_backward_rounds(device: str) -> None:
    def joined(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, int]:
        both = torch.cat([x, y], 1)
        return torch.relu(both @ w), both.shape[1]

    fast = compiled(joined, device)
    w = torch.randn(6, 4, device=device, requires_grad=True)
    kept: list[tuple[Any, Any]] = []
    for _ in range(3):
        for x, y in zip(inputs_of(device, 5, 3, calls=2), inputs_of(device, 5, 3, calls=2), strict=True):
            got, expected = fast(x, y, w), joined(x, y, w)
            kept.append((got, expected))
            assert_same(*(torch.autograd.grad(out[0].square().sum(), w)[0] for out in (got, expected)))
        for got, expected in kept:
            assert_same(got[0], expected[0])
            assert got[1] == expected[1] == 6
