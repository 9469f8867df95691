"""Random modules and random ways to call them, run by eager and by the backend side by side.

A program is a list of steps on a growing list of tensors of shape (rows, 4): arithmetic, views, in-place writes,
state, dropout. A sequence calls it on fresh, reused and fed-back inputs in odd layouts, in several modes and sizes,
keeps results, runs backwards late, changes weights. After every call everything either side can see is compared.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers.backend_calls import assert_same, compiled, gradients, kept, state
from torch import Tensor, nn

WIDTH = 4
Step = Callable[["RandomModule", Tensor, Tensor], Tensor]


def _write_a_clone(module: RandomModule, a: Tensor, b: Tensor) -> Tensor:
    z = a.clone()
    z[:, 1:].mul_(0.5)
    z.t()[0].add_(b[:, 0])
    return z


def _write_through_a_view(module: RandomModule, a: Tensor, b: Tensor) -> Tensor:
    z = a.new_zeros(a.shape)
    z.view(-1)[1:].add_(0.5)
    z[::2].copy_(b[::2])
    return z


def _state(module: RandomModule, a: Tensor, b: Tensor) -> Tensor:
    module.seen.mul_(0.5).add_(a.detach().mean(0))
    module.calls += 1
    return b + module.seen


STEPS: dict[str, Step] = {
    "add": lambda m, a, b: a + b,
    "product": lambda m, a, b: torch.tanh(a * b),
    "difference": lambda m, a, b: (a - b) * 0.5,
    "linear": lambda m, a, b: torch.tanh(a @ m.weight + m.bias),
    "shared": lambda m, a, b: torch.sin(b @ m.weight.t()),
    "relu": lambda m, a, b: torch.relu(a) - 0.1,
    "rows": lambda m, a, b: a.flip(0),
    "expanded": lambda m, a, b: b[:, :1].expand_as(a),
    "swapped": lambda m, a, b: torch.cat(a.chunk(2, 1)[::-1], 1),
    "transposed": lambda m, a, b: a.t().contiguous().t(),
    "reshaped": lambda m, a, b: a.reshape(-1).view(a.shape),
    "alias": lambda m, a, b: a[:],
    "total": lambda m, a, b: a.sum(0, keepdim=True) * 0.1 + b,
    "where": lambda m, a, b: torch.where(a > 0, a, b),
    "dropout": lambda m, a, b: nn.functional.dropout(a, 0.25, training=True),
    "write_a_clone": _write_a_clone,
    "write_through_a_view": _write_through_a_view,
    "state": _state,
    "sized": lambda m, a, b: a / a.shape[0],
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a module does; made from a seed."""

    steps: tuple[tuple[str, int, int], ...]
    writes_input: bool
    outputs: tuple[tuple[str, int], ...]

    @classmethod
    def random(cls, seed: int) -> Program:
        rng = random.Random(seed)
        steps = tuple((rng.choice(list(STEPS)), rng.randrange(99), rng.randrange(99)) for _ in range(rng.randint(3, 8)))
        kinds = ["plain", "plain", "plain", "row", "transposed", "detached", "size", "moved", "buffer"]
        outputs = tuple((rng.choice(kinds), rng.randrange(99)) for _ in range(rng.randint(1, 4)))
        return cls(steps=steps, writes_input=rng.random() < 0.3, outputs=(("plain", -1), *outputs))


class RandomModule(nn.Module):
    """Runs a program. Double precision: what differs then is no rounding."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) * 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        if self.program.writes_input:
            y.mul_(0.5).add_(0.25)
        pool = [x, y]
        for name, i, j in self.program.steps:
            pool.append(STEPS[name](self, pool[i % len(pool)], pool[j % len(pool)]))
        return tuple(self._output(kind, pool[i if i < 0 else i % len(pool)]) for kind, i in self.program.outputs)

    def _output(self, kind: str, value: Tensor) -> Any:
        outputs: dict[str, Callable[[], Any]] = {
            "plain": lambda: value,
            "row": lambda: value[1:],
            "transposed": lambda: value.t(),
            "detached": lambda: value.detach() * 2,
            "size": lambda: value.shape[0],
            "moved": lambda: value + 0.125,
            "buffer": lambda: self.seen,
        }
        return outputs[kind]()


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t,
    lambda t: t.t().contiguous().t(),
    lambda t: torch.cat([t, t], 1)[:, ::2],
    lambda t: torch.cat([t[:1], t])[1:],
)


@dataclass(frozen=True, kw_only=True)
class Variety:
    """What differs between the calls of one program. Most of it costs a compile, so each program gets some."""

    modes: tuple[str, ...]
    sizes: tuple[int, ...]
    layouts: tuple[Callable[[Tensor], Tensor], ...]
    same_twice: bool
    grads_of_inputs: bool

    @classmethod
    def random(cls, seed: int) -> Variety:
        rng = random.Random(f"variety {seed}")
        modes = rng.choice([("train",), ("train", "no_grad"), ("train", "inference"), ("no_grad", "inference")])
        odd = rng.choice([(), (), LAYOUTS[1:2], LAYOUTS[2:3], LAYOUTS[3:]])
        return cls(
            modes=modes,
            sizes=rng.choice([(3,), (2, 3), (2, 3, 5)]),
            layouts=(LAYOUTS[0], *odd),
            same_twice=rng.random() < 0.3,
            grads_of_inputs=rng.random() < 0.3,
        )


@dataclass(kw_only=True)
class Side:
    """Eager's, or the backend's, half of a sequence."""

    call: Callable[..., tuple[Any, ...]]
    module: RandomModule
    held: list[Any] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    past: list[Tensor] = field(default_factory=list)


class CallSequence:
    """A random sequence of calls of one program on both sides."""

    def __init__(self, seed: int, sides: Sequence[Side], device: str, variety: Variety) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.sides, self.device, self.variety = sides, device, variety

    def run(self, calls: int) -> None:
        for _ in range(calls):
            self._change_weights()
            self._call()
            self._late_backwards()
            self._compare()
        for side in self.sides:
            side.held.clear()

    def _fresh(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator).to(self.device)

    def _inputs(self, rows: int, mode: str) -> list[list[Tensor]]:
        """x and y for each side: fresh ones in odd layouts, or what an earlier call returned."""
        layouts = [self.rng.choice(self.variety.layouts), LAYOUTS[0]]
        values = [self._fresh(rows, WIDTH) for _ in range(2)]
        reuse, wants_grad = self.rng.random(), self.variety.grads_of_inputs and mode == "train"
        given = []
        for side in self.sides:
            x, y = (layout(value.clone()) for layout, value in zip(layouts, values, strict=True))
            fitting = [t for t in side.past if t.shape == x.shape]
            if reuse < 0.3 and fitting:
                x = fitting[-1]
            elif reuse < 0.4 and self.variety.same_twice and not side.module.program.writes_input:
                y = x
            elif wants_grad:
                x = x.detach().requires_grad_()
            given.append([x, y])
        return given

    def _call(self) -> None:
        rows, mode = self.rng.choice(self.variety.sizes), self.rng.choice(self.variety.modes)
        hold, seed = self.rng.random(), self.rng.randrange(1000)
        backward, zero = self.rng.random(), self.rng.random() < 0.5
        results = []
        for side, (x, y) in zip(self.sides, self._inputs(rows, mode), strict=True):
            if zero:
                side.module.zero_grad(set_to_none=seed % 2 == 0)
            torch.manual_seed(seed)
            with torch.set_grad_enabled(mode == "train"), torch.inference_mode(mode == "inference"):
                outputs = side.call(x, y)
            tensors = [value for value in outputs if isinstance(value, Tensor)]
            results.append(
                (
                    kept(outputs),
                    kept((x, y)),
                    _aliasing([*tensors, x, y, side.module.seen]),
                    [(t.requires_grad, t.stride()) for t in tensors],
                )
            )
            if mode == "train" and outputs[0].requires_grad:
                loss = sum(t.square().sum() for t in tensors if t.requires_grad)
                side.losses.append(loss)  # type: ignore[arg-type]
                if backward < 0.6:
                    side.losses.pop().backward()
                    results[-1] += (kept(x.grad) if x.is_leaf and x.requires_grad else None,)
            if mode != "inference":
                side.past = [t.detach() for t in tensors if t.shape == x.shape]
            if hold < 0.5:
                side.held.append(tensors if hold < 0.25 else [t[..., :1] for t in tensors])
            elif hold < 0.7 and side.held:
                side.held.pop(0)
        assert_same(results[1], results[0])

    def _late_backwards(self) -> None:
        if self.rng.random() < 0.5:
            which = self.rng.random()
            for side in self.sides:
                if side.losses:
                    side.losses.pop(int(which * len(side.losses))).backward()
        if self.rng.random() < 0.2:
            for side in self.sides:
                side.losses.clear()  # forwards whose backward never runs

    def _change_weights(self) -> None:
        how, value = self.rng.randrange(40), self._fresh(WIDTH, WIDTH) * 0.5
        for side in self.sides:
            weight = side.module.weight
            if how == 0:
                weight.data = value.clone()
            elif how < 6 and not side.losses:  # autograd rightly refuses it while a backward waits
                with torch.no_grad():
                    weight.mul_(0.9).add_(value, alpha=0.1)
            elif how == 6:
                side.module.seen.zero_() if not side.losses else None

    def _compare(self) -> None:
        eager, fast = self.sides
        assert_same(gradients(fast.module), gradients(eager.module))
        assert_same(state(fast.module), state(eager.module))
        assert_same(fast.held, eager.held)


def _aliasing(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor, the first that shares its memory."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [storages.index(storage) for storage in storages]


def run_program(seed: int, device: str, *, sequences: int, calls: int = 8) -> Any:
    """Run sequences of one program on both sides; return the compiled function for its report.

    Raises:
        AssertionError: the sides differ; the message names seeds and program.
    """
    program, variety = Program.random(seed), Variety.random(seed)
    torch.manual_seed(seed)
    module = RandomModule(program).to(device)
    twin = copy.deepcopy(module)
    fast = compiled(twin, device, dynamic=seed % 3 == 0 or None, fallback_random=True)
    start = copy.deepcopy(module.state_dict())
    for number in range(sequences):
        for one in (module, twin):
            one.zero_grad()
            one.load_state_dict(start)
        sides = [Side(call=module, module=module), Side(call=fast, module=twin)]
        try:
            with torch._dynamo.config.patch(recompile_limit=64):
                CallSequence(seed * 1000 + number, sides, device, variety).run(calls)
        except Exception as error:
            raise AssertionError(f"seed {seed}, sequence {number}: {program}\n{variety}\n{error}") from error
    return fast
