"""Scenarios: whole models in inference and training, 20 calls each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.backend_calls import assert_captured, assert_same, eager_and_compiled, gradients, state
from helpers.models import WIDTH, Decoder, LstmCell, UNet, VisionTransformer
from torch import Tensor, nn

CALLS = 20
# Convolutions on a GPU round to TF32, in another order when compiled.
TOLERANCE: dict[str, dict[str, float]] = {"cpu": {"rtol": 1e-4, "atol": 1e-5}, "cuda": {"rtol": 2e-2, "atol": 5e-3}}


def _train(models: tuple[Any, Any], device: str, run: Callable[[Any, int], Tensor]) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    for call in range(CALLS):
        seen = []
        for m, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = run(m, call)
            loss.backward()
            seen.append((loss.detach().clone(), gradients(getattr(m, "_orig_mod", m))))
            optimizer.step()
        assert_same(seen[1], seen[0], **TOLERANCE[device])
    assert_same(state(models[1]._orig_mod), state(models[0]), **TOLERANCE[device])
    assert_captured(models[1])


def _infer(models: tuple[Any, Any], device: str, run: Callable[[Any, int], Any]) -> None:
    with torch.no_grad():
        for call in range(CALLS):
            expected, got = (run(m, call) for m in models)
            assert_same(got, expected, **TOLERANCE[device])
    assert_captured(models[1])


def check_decoder_with_its_cache(device: str) -> None:
    tokens = torch.randint(0, 11, (CALLS, 2), device=device)
    models = eager_and_compiled(Decoder(), device)

    def step(m: Any, call: int) -> Tensor:
        return m(tokens[call], torch.tensor([call], device=device))

    _infer(models, device, step)
    assert_same(state(models[1]._orig_mod), state(models[0]), **TOLERANCE[device])
    _train(models, device, lambda m, call: nn.functional.cross_entropy(step(m, call), tokens[call]))


def check_vision_transformer(device: str) -> None:
    images = torch.randn(CALLS, 2, 3, 8, 8, device=device)
    models = eager_and_compiled(VisionTransformer(), device)
    _infer(models, device, lambda m, call: m(images[call]))
    _train(models, device, lambda m, call: m(images[call]).square().mean())


def check_unet(device: str) -> None:
    images = torch.randn(CALLS, 2, 3, 8, 8, device=device)
    models = eager_and_compiled(UNet().eval(), device)
    _infer(models, device, lambda m, call: m(images[call]))
    for m in models:
        m.train()
    _train(models, device, lambda m, call: m(images[call]).square().mean())


def check_lstm_cell_loop(device: str) -> None:
    """The state goes from call to call: outputs are the next inputs, and are saved for one long backward."""
    xs = torch.randn(CALLS, 3, 6, device=device)
    models = eager_and_compiled(LstmCell(), device)

    def sequence(m: Any, length: int) -> list[Tensor]:
        hidden, cell = torch.zeros(2, 3, WIDTH, device=device).unbind()
        seen = []
        for x in xs[:length]:
            hidden, cell = m(x, hidden, cell)
            seen.append(hidden)
        return seen

    with torch.no_grad():
        expected, got = (sequence(m, CALLS) for m in models)
        assert_same(got, expected)
    assert_captured(models[1])
    for _ in range(4):
        for length in (5, 20):
            grads = []
            for m in models:
                m.zero_grad()
                torch.stack(sequence(m, length)).square().sum().backward()
                grads.append(gradients(getattr(m, "_orig_mod", m)))
            assert_same(grads[1], grads[0], **TOLERANCE[device])
