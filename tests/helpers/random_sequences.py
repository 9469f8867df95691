"""Random sequences of calls on eager's side and on the backend's, all that either can see compared after every call."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from helpers.comparing import compare
from helpers.random_calls import LAYOUTS, Call, Variety
from helpers.random_programs import WIDTH, Program, RandomModule
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(kw_only=True)
class Side:
    """Eager's, or the backend's, half of a sequence."""

    call: Callable[..., tuple[Any, ...]]
    module: RandomModule
    outputs: tuple[Any, ...] = ()
    x: Tensor = field(default_factory=lambda: torch.empty(0))
    y: Tensor = field(default_factory=lambda: torch.empty(0))
    held: list[Callable[[], list[Tensor]]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    past: list[Tensor] = field(default_factory=list)
    random_state: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [value for value in tree_leaves(self.outputs) if isinstance(value, Tensor)]


class CallSequence:
    """A random sequence of calls of one program on both sides."""

    def __init__(self, seed: int, program: Program, variety: Variety, sides: Sequence[Side], device: str) -> None:
        self.program, self.variety = program, variety
        self.made: list[Call] = []
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._sides, self._device = sides, device

    def run(self, calls: int) -> None:
        for _ in range(calls):
            call = Call.random(self._rng, self.variety, first=not self.made)
            self.made.append(call)
            self._change_weights(call)
            values = [self._fresh(call.rows, WIDTH) for _ in range(2)]
            for side in self._sides:
                self._forward(side, call, values)
            compare(*(_after_forward(side) for side in self._sides))
            for side in self._sides:
                self._use_results(side, call)
            compare(*(_after_backward(side) for side in self._sides))

    def _fresh(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.variety.dtype, generator=self._generator).to(self._device)

    def _change_weights(self, call: Call) -> None:
        how, value = call.weights, self._fresh(WIDTH, WIDTH) * 0.5
        for side in self._sides:
            module, waiting = side.module, bool(side.losses)
            if how == "replaced":
                module.weight = torch.nn.Parameter(value.clone())
            elif waiting:
                # Autograd rightly refuses the others while a backward waits, and cannot see .data: compiled code may
                # have saved the parameter where eager saved a view of its old memory.
                continue
            elif how == ".data":
                module.weight.data = value.clone()
            with torch.no_grad():
                if how == "in place":
                    module.weight.mul_(0.9).add_(value, alpha=0.1)
                elif how == "zero state":
                    module.seen.zero_()
                elif how == "step":
                    for parameter in module.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad.clamp(-1, 1), alpha=0.05)

    def _inputs(self, side: Side, call: Call, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """x and y: fresh ones, in odd layouts or sharing memory, or what an earlier call returned."""
        special = self.variety.inputs if call.special_inputs else "plain"
        x, y = (value.clone() for value in values)
        if special in LAYOUTS and not (special == "expanded" and self.program.writes_x):
            x = LAYOUTS[special](x)
        fitting = [t for t in side.past if t.shape == x.shape and not (self.program.writes_x and _overlaps_itself(t))]
        if call.x == "past" and fitting and not (self.program.writes_x and side.losses):
            x = fitting[-1]
        elif special == "same twice":
            y = x
        elif special == "overlapping":
            both = torch.cat([x, y])
            x, y = both[: call.rows], both[1 : call.rows + 1]
        elif special == "gradients" and call.mode == "train" and not self.program.writes_x:
            x.requires_grad_()
        return x, y

    def _forward(self, side: Side, call: Call, values: Sequence[Tensor]) -> None:
        if call.zero != "keep":
            side.module.zero_grad(set_to_none=call.zero == "none")
        side.module.train(call.mode != "eval")
        side.x, side.y = self._inputs(side, call, values)
        with _random_state(side, self._device, call.seed), _mode(call.mode):
            side.outputs = side.call(side.x, side.y)

    def _use_results(self, side: Side, call: Call) -> None:
        tensors = side.tensors()
        if call.mode != "train" and call.scribble is not None and not side.losses:
            written = [*tensors, side.x, side.y][call.scribble % (len(tensors) + 2)]
            if not _overlaps_itself(written):
                with _mode(call.mode):
                    written.mul_(0.5) if written.is_floating_point() else written.add_(1)
        if call.mode != "inference":
            side.past = [t.detach() for t in tensors if t.shape == side.x.shape and not call.drop_outputs]
        _hold(side, call.hold, tensors)
        wanting = [t for t in tensors if t.requires_grad]
        loss = sum(
            (t.square().sum() for t in wanting[: 1 if call.backward == "first output" else None]), torch.zeros(())
        )
        del tensors, wanting
        if side.x.requires_grad and side.x.is_leaf:
            side.leaves = [*side.leaves[-2:], side.x]
        if call.drop_outputs:
            side.outputs = ()
        if loss.requires_grad:
            self._backward(side, call.backward, loss)
        if call.late is not None and side.losses:
            side.losses.pop(int(call.late * len(side.losses))).backward()

    def _backward(self, side: Side, how: str, loss: Tensor) -> None:
        if how == "later":
            side.losses.append(loss)
        elif how == "never":
            side.losses.clear()
        elif how == "grad":
            found = list(torch.autograd.grad(loss, list(side.module.parameters()), materialize_grads=True))
            side.held.append(lambda: found)
        else:
            if how == "twice" and not self.variety.donated:
                loss.backward(retain_graph=True)
            loss.backward()


def _hold(side: Side, how: str, tensors: list[Tensor]) -> None:
    if how == "all":
        side.held.append(lambda: tensors)
    elif how == "views":
        views = [t[..., :1] if t.dim() else t for t in tensors]
        side.held.append(lambda: views)
    elif how == "storages":
        storages = [(t.untyped_storage(), t.dtype, (t.storage_offset(), t.size(), t.stride())) for t in tensors]
        side.held.append(lambda: [_on(*storage) for storage in storages])
    elif how == "one less" and side.held:
        side.held.pop(0)


def _on(storage: torch.UntypedStorage, dtype: torch.dtype, layout: tuple[int, torch.Size, tuple[int, ...]]) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *layout)


@contextlib.contextmanager
def _mode(mode: str) -> Iterator[None]:
    # In this order: inference_mode(False) turns gradients on.
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "train"):
        yield


@contextlib.contextmanager
def _random_state(side: Side, device: str, seed: int | None) -> Iterator[None]:
    get, put = (
        (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
        if device == "cuda"
        else (torch.get_rng_state, torch.set_rng_state)
    )
    if seed is None:
        assert side.random_state is not None
        put(side.random_state)
    else:
        torch.manual_seed(seed)
    yield
    side.random_state = get()


def _overlaps_itself(tensor: Tensor) -> bool:
    return torch._debug_has_internal_overlap(tensor) != 0


def _after_forward(side: Side) -> dict[str, Any]:
    tensors = side.tensors()
    return {
        "outputs": side.outputs,
        "inputs": [side.x, side.y],
        "sharing memory": _aliasing([*tensors, side.x, side.y, side.module.seen]),
        "autograd and strides": [(t.requires_grad, t.stride()) for t in tensors],
    }


def _after_backward(side: Side) -> dict[str, Any]:
    return {
        "outputs": side.outputs,
        "gradients": {name: _gradient(parameter) for name, parameter in side.module.named_parameters()},
        "gradients of inputs": [_gradient(leaf) for leaf in side.leaves],
        "state": side.module.state_dict(),
        "held": [held() for held in side.held],
        "past": side.past,
    }


def _gradient(leaf: Tensor) -> Tensor:
    """Zeros for None: AOTAutograd gives those where a loss leaves out what alone depends on the leaf."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _aliasing(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor, the first that shares its memory."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [storages.index(storage) for storage in storages]
