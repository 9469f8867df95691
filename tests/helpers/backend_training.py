"""Scenarios: forward and backward graphs, gradients, state that a training step changes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers.backend_calls import (
    assert_captured,
    assert_same,
    compiled,
    eager_and_compiled,
    gradients,
    inputs_of,
    kept,
    parts,
    state,
)
from torch import Tensor, nn

WIDTH = 6


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) + x


def mlp_pair(device: str, **options: Any) -> tuple[Any, Any]:
    return eager_and_compiled(Mlp(), device, **options)


def batches(device: str, calls: int = 6) -> list[Tensor]:
    return inputs_of(device, 3, WIDTH, calls=calls)


def both(models: Sequence[Any], step: Callable[[Any], Any]) -> None:
    """Run ``step`` on eager, then on the compiled model; results, gradients and state are equal."""
    model, fast = models
    expected, got = kept(step(model)), kept(step(fast))
    assert_same(got, expected)
    assert_same(gradients(fast._orig_mod), gradients(model))
    assert_same(state(fast._orig_mod), state(model))


def check_steps_with_an_eager_optimizer(device: str) -> None:
    for optimizer in (torch.optim.SGD, torch.optim.Adam):
        model, fast = mlp_pair(device)
        optimizers = {id(m): optimizer(m.parameters(), lr=0.05) for m in (model, fast)}

        def step(m: Any, x: Tensor, optimizers: dict[int, Any] = optimizers) -> Tensor:
            optimizers[id(m)].zero_grad()
            loss = m(x).square().mean()
            loss.backward()
            optimizers[id(m)].step()
            return loss

        for x in batches(device, 8):
            both((model, fast), lambda m, x=x: step(m, x))
        assert_captured(fast)


def check_gradient_of_the_very_first_and_of_every_call(device: str) -> None:
    models = mlp_pair(device)

    def step(m: Any, x: Tensor) -> Any:
        m.zero_grad()
        x = x.clone().requires_grad_()
        y = m(x)
        y.sin().sum().backward()
        return y, x.grad

    for x in batches(device):
        both(models, lambda m, x=x: step(m, x))
    assert_captured(models[1])


def check_warmed_up_on_a_side_stream_with_the_loss_kept(device: str) -> None:
    """Losses that live keep the nodes which add to ``.grad``, and those keep the stream they were made on."""
    models = mlp_pair(device)
    losses: list[Tensor] = []
    values: list[Tensor] = []

    def step(m: Any, x: Tensor) -> Tensor:
        m.zero_grad()
        loss: Tensor = m(x).square().sum()
        loss.backward()
        losses.append(loss)
        values.append(kept(loss))
        return loss

    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []
    for i, x in enumerate(batches(device)):
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream", UserWarning)  # torch's own hint
            if streams:
                torch.cuda.synchronize()
                stack.enter_context(torch.cuda.stream(streams[min(i, 1)]))
                stack.callback(torch.cuda.synchronize)
            both(models, lambda m, x=x: step(m, x))  # type: ignore[misc]
    assert_captured(models[1])
    assert_same([loss.detach() for loss in losses], values)  # none was overwritten


def check_accumulation(device: str) -> None:
    for set_to_none in (True, False):
        models = mlp_pair(device)

        def step(m: Any, pair: Sequence[Tensor], set_to_none: bool = set_to_none) -> Any:
            m.zero_grad(set_to_none=set_to_none)
            return [_backward(m, x) for x in pair]

        inputs = batches(device, 10)
        for i in range(0, 10, 2):
            both(models, lambda m, i=i, step=step, inputs=inputs: step(m, inputs[i : i + 2]))
        assert_captured(models[1])


def _backward(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    y.square().sum().backward()
    return y


def check_gradients_held_over_steps(device: str) -> None:
    model, fast = mlp_pair(device)
    held: list[tuple[Any, Any]] = []
    for x in batches(device, 8):
        got = torch.autograd.grad(fast(x).square().sum(), list(fast.parameters()))
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        held.append((got, expected))
    for got, expected in held:
        assert_same(got, expected)


def check_several_forwards_before_their_backwards(device: str) -> None:
    models = mlp_pair(device)

    def step(m: Any, inputs: Sequence[Tensor], order: Sequence[int]) -> Any:
        m.zero_grad()
        losses = [m(x).square().sum() for x in inputs]
        for i in order:
            losses[i].backward()
        return losses

    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2], [1], [2, 0, 1]):
        inputs = batches(device, 3)
        both(models, lambda m, i=inputs, o=order: step(m, i, o))


def check_forwards_whose_backward_never_runs(device: str) -> None:
    models = mlp_pair(device)
    held: list[Tensor] = []

    def step(m: Any, x: Tensor, keep: bool) -> Any:
        m.zero_grad()
        unused = m(x * 2)
        if keep:
            held.append(unused)
        del unused
        return _backward(m, x)

    for i, x in enumerate(batches(device, 8)):
        both(models, lambda m, x=x, keep=i % 2 == 0: step(m, x, keep))
    for expected, got in zip(held[::2], held[1::2], strict=True):
        assert_same(got, expected)
        got.sum().backward()


def check_retain_graph_with_two_backwards(device: str) -> None:
    models = mlp_pair(device)

    def step(m: Any, x: Tensor) -> Any:
        m.zero_grad()
        y = m(x)
        y.sum().backward(retain_graph=True)
        first = [kept(p.grad) for p in m.parameters()]
        (y * 3).sum().backward()
        return y, first

    with _donated_buffers_off():
        for x in batches(device):
            both(models, lambda m, x=x: step(m, x))
        assert_captured(models[1])


def check_code_that_overwrites_what_was_saved_is_not_taken_from_a_cache(device: str) -> None:
    """The keys of Inductor's caches do not tell code that may do so from code that may not."""

    def activated(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w) * 2  # its backward works in the memory of the product

    def gradients_of(function: Any, x: Tensor, *, twice: bool) -> Any:
        w = torch.linspace(-1, 1, 12, device=device).view(4, 3).requires_grad_()
        y = function(x, w)
        return [torch.autograd.grad(y.sum(), w, retain_graph=twice) for _ in range(1 + twice)]

    for x in inputs_of(device, 5, 4):
        assert_same(gradients_of(compiled(activated, device), x, twice=False), gradients_of(activated, x, twice=False))
    torch._dynamo.reset()
    with _donated_buffers_off():
        fast = compiled(activated, device)
        for x in inputs_of(device, 5, 4):
            assert_same(gradients_of(fast, x, twice=True), gradients_of(activated, x, twice=True))


@contextlib.contextmanager
def _donated_buffers_off() -> Any:
    """torch itself refuses retain_graph where the backward may overwrite what the forward saved."""
    from torch._functorch import config

    with config.patch(donated_buffer=False):
        yield


def check_checkpoint(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x.cos(), use_reentrant=False).sin()

    inside, outside = eager_and_compiled(Inside(), device), mlp_pair(device)

    def round_the_call(m: Any, x: Tensor) -> Tensor:
        m.zero_grad()
        y = checkpoint(m, checkpoint(m, x, use_reentrant=False), use_reentrant=False)
        y.square().sum().backward()
        return y

    def within(m: Any, x: Tensor) -> Tensor:
        m.zero_grad()
        return _backward(m, x)

    for x in batches(device):
        both(inside, lambda m, x=x: within(m, x))
        both(outside, lambda m, x=x: round_the_call(m, x.requires_grad_()))


def check_batch_norm_counts_each_call_once(device: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x)).relu()

    models = eager_and_compiled(Normed(), device)

    def step(m: Any, x: Tensor, mode: str) -> Tensor:
        m.zero_grad()
        m.train(mode != "eval")
        if mode == "train":
            return _backward(m, x)
        with torch.no_grad():
            return m(x)

    for mode in ("train", "train", "train", "eval", "train", "no_grad", "no_grad", "no_grad", "eval", "eval", "train"):
        (x,) = batches(device, 1)
        both(models, lambda m, x=x, mode=mode: step(m, x, mode))
    assert models[1]._orig_mod.norm.num_batches_tracked.item() == 8


MODES: dict[str, Callable[[], Any]] = {
    "train": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def check_modes_in_every_order(device: str) -> None:
    from itertools import permutations

    for order in permutations(MODES):
        torch._dynamo.reset()
        models = mlp_pair(device)

        def step(m: Any, x: Tensor, mode: str) -> Tensor:
            m.zero_grad()
            with MODES[mode]():
                y = m(x)
            if mode == "train":
                y.sum().backward()
            assert y.requires_grad == (mode == "train")
            return y

        for mode in [*order, *order, *order, *(m for m in order for _ in range(3))]:
            (x,) = batches(device, 1)
            both(models, lambda m, x=x, mode=mode, step=step: step(m, x, mode))
        assert_captured(models[1])


def check_results_of_one_mode_used_in_another(device: str) -> None:
    model, fast = mlp_pair(device)
    for x in batches(device, 8):
        with torch.no_grad():
            got, expected = fast(x), model(x)
        _same_gradients(fast, model, got, expected)
        with torch.inference_mode():
            got, expected = fast(x), model(x)
        assert_same(got.clone(), expected.clone())
        with torch.inference_mode():
            assert_same(fast(got), model(expected))


def _same_gradients(fast: Any, model: Any, got: Tensor, expected: Tensor) -> None:
    fast.zero_grad()
    model.zero_grad()
    assert_same(_backward(fast, got), _backward(model, expected))
    assert_same(gradients(fast._orig_mod), gradients(model))


def check_autocast_on_and_off(device: str) -> None:
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    models = mlp_pair(device)
    seen = set()
    for i, x in enumerate(batches(device, 12)):
        results, grads = [], []
        for m in models:
            m.zero_grad()
            with torch.autocast(device, dtype=dtype, enabled=i % 4 < 2):
                y = m(x)
            y.float().square().sum().backward()
            seen.add(y.dtype)
            results.append(kept(y))
            grads.append([kept(p.grad) for p in m.parameters()])
        assert_same(results[1], results[0], rtol=2e-2, atol=2e-2)
        assert_same(grads[1], grads[0], rtol=3e-2, atol=3e-2)
    assert_captured(models[1])


def check_gradient_scaler(device: str) -> None:
    model, fast = mlp_pair(device)
    rounds = []
    for m in (model, fast):
        torch.manual_seed(3)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        seen = []
        for i, x in enumerate(batches(device, 8)):
            optimizer.zero_grad()
            loss = m(x).square().mean() * (float("inf") if i == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), [kept(p) for p in m.parameters()]))
        rounds.append(seen)
    assert_same(rounds[1], rounds[0])
    assert_captured(fast)


def check_compiled_optimizer_step_with_tensor_lr(device: str) -> None:
    for make in (torch.optim.SGD, torch.optim.Adam):
        torch._dynamo.reset()
        runs = []
        for fast in (False, True):
            torch.manual_seed(7)
            model = Mlp().to(device)
            lr = torch.tensor(0.1, device=device)
            more = {"capturable": True} if make is torch.optim.Adam and device == "cuda" else {}
            optimizer = make(model.parameters(), lr=lr, **more)
            step: Any = compiled(optimizer.step, device) if fast else optimizer.step
            seen = []
            for i, x in enumerate(batches(device, 7)):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                lr.fill_(0.1 / (i + 1))
                step()
                seen.append([kept(p) for p in model.parameters()])
            runs.append(seen)
        assert_same(runs[1], runs[0])
        if make is torch.optim.SGD:
            assert any(part.state == "captured" for part in parts(step))


def check_shared_and_frozen_parameters(device: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu())

    models = eager_and_compiled(Tied(), device)

    def step(m: Any, x: Tensor, frozen: bool) -> Tensor:
        m.zero_grad()
        inner = getattr(m, "_orig_mod", m)
        inner.first.bias.requires_grad_(not frozen)
        inner.second.bias.requires_grad_(frozen)
        return _backward(m, x)

    for i, x in enumerate(batches(device, 10)):
        both(models, lambda m, x=x, frozen=i // 3 % 2 == 1: step(m, x, frozen))


def check_one_code_serves_several_modules(device: str) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Mlp() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Stack().to(device)
    fast = copy.deepcopy(model)
    for block in fast.blocks:
        block.compile(backend=compiled_backend(), options={"host_capture": device == "cpu"})
    for x in batches(device, 8):
        for m in (model, fast):
            m.zero_grad()
        assert_same(_backward(fast, x), _backward(model, x))
        assert_same(gradients(fast), gradients(model))
        with torch.no_grad():
            assert_same(fast(x), model(x))


def compiled_backend() -> Any:
    from graphcap_backend.backend import graphcap

    return graphcap


def _replace_in_place(layer: nn.Linear, value: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(value)


def _assign(layer: nn.Linear, value: Tensor) -> None:
    layer.load_state_dict({**layer.state_dict(), "weight": value.clone()}, assign=True)


WEIGHT_CHANGES: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "none": lambda layer, value: None,
    "in_place": _replace_in_place,
    "data_in_place": lambda layer, value: layer.weight.data.mul_(0).add_(value),
    "data": lambda layer, value: setattr(layer.weight, "data", value.clone()),
    "assign": _assign,
    "new_parameter": lambda layer, value: setattr(layer, "weight", nn.Parameter(value.clone())),
}


def check_weights_changed_in_every_way(device: str) -> None:
    models = mlp_pair(device)
    order = [name for change in WEIGHT_CHANGES for name in (change, "none", "none")] + list(WEIGHT_CHANGES)

    def step(m: Any, x: Tensor, train: bool) -> Tensor:
        m.zero_grad()
        if train:
            return _backward(m, x)
        with torch.no_grad():
            return m(x)

    for train in (True, False):
        for how in order:
            value = torch.randn(12, WIDTH, device=device)
            for m in models:
                WEIGHT_CHANGES[how](getattr(m, "_orig_mod", m).up, value)
            (x,) = batches(device, 1)
            both(models, lambda m, x=x, train=train: step(m, x, train))


def check_input_gradients_accumulate(device: str) -> None:
    model, fast = mlp_pair(device)
    for_eager, mine = (torch.ones(3, WIDTH, device=device, requires_grad=True) for _ in range(2))
    for i in range(8):
        model(for_eager * i).sum().backward()
        fast(mine * i).sum().backward()
        assert_same(mine.grad, for_eager.grad)
        if i % 3 == 2:
            mine.grad = for_eager.grad = None


def check_concat_matmul_relu_with_an_int(device: str) -> None:
    class Concat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 4))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
            z = torch.cat([x, y]) @ self.weight
            return z.relu(), z.shape[0]

    model, fast = eager_and_compiled(Concat(), device)
    for _ in range(4):
        x, y = batches(device, 2)
        outputs = [m(x, y) for m in (model, fast)]
        for value, _ in outputs:
            value.square().sum().backward()
        second = [m(y, x) for m in (model, fast)]
        for value, _ in second:
            value.sum().backward()
        assert_same([outputs[1], second[1]], [outputs[0], second[0]])
        assert_same(gradients(fast._orig_mod), gradients(model))


def check_saved_tensors_survive_a_written_output(device: str) -> None:
    """The output of one call is changed in place and used by another before its backward runs."""
    model, fast = mlp_pair(device)
    for x in batches(device):
        grads = []
        for m in (model, fast):
            m.zero_grad()
            first = m(x)
            second = m(first * 2)
            first.data.zero_()
            second.sum().backward()
            grads.append(gradients(getattr(m, "_orig_mod", m)))
        assert_same(grads[1], grads[0])


def check_dropout_masks_differ_and_repeat_after_reseeding(device: str) -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x, 0.5) * 3

    fast = compiled(Dropping(), device)
    x = torch.ones(400, device=device, requires_grad=True)

    def sequence() -> list[Tensor]:
        torch.manual_seed(11)
        seen = []
        for i in range(6):
            y = fast(x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            assert_same(gradient, y)  # the backward uses the forward's mask
            seen.append(y.detach().clone())
            if i % 2:
                seen.append(torch.rand(400, device=device))  # an eager draw in between
        return seen

    first, second, third = sequence(), sequence(), sequence()
    assert_same(second, third)
    assert_same(first[2:], second[2:])
    masks = [tuple(y.gt(0).tolist()) for y in second if y.max() > 1]
    assert len(set(masks)) == len(masks) == 6
    assert_captured(fast)


def check_backward_that_works_in_the_memory_of_what_was_saved(device: str) -> None:
    """The gradient of ``b`` is made where the forward's activation was, which a graph gets as a copy here."""

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (x @ w + b).sigmoid().exp().sum(1)

    w, b = (torch.randn(8, 8, device=device, requires_grad=True) for _ in range(2))
    fast = compiled(loss, device, max_held_instances=1)
    for _ in range(3):
        batches = inputs_of(device, 8, 8, calls=4)
        # More forwards at once than instances: the activations are copies, at another address each time.
        for x, y in [(x, fast(x, w, b)) for x in batches]:
            got = torch.autograd.grad(y.sum(), (w, b))
            assert_same(got, torch.autograd.grad(loss(x, w, b).sum(), (w, b)), rtol=1e-4, atol=1e-4)
    assert_captured(fast)
