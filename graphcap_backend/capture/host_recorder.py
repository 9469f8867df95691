"""The dispatch mode that records what runs on CPU tensors while a HostGraph captures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from graphcap_backend.capture.host_launch import Launch, describe
from graphcap_backend.capture.host_memory import (
    Borrowed,
    HostMemory,
    map_tensors,
    plain_kernels,
    retained,
    tensors_in,
)
from graphcap_backend.capture.host_operators import (
    Role,
    higher_order_refusal,
    refuse_other_memory,
    refuse_uncapturable,
    role_of,
    written_arguments,
)
from graphcap_backend.errors import CaptureError

LaunchListener = Callable[[int, int], None]


class HostRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records launches from ``start`` to ``stop`` on one thread.

    It sits below the user's own modes, so that what it records is what reaches the kernels.
    ``failure`` is the first thing that made the capture invalid; as on CUDA it stays invalid
    even when the caller caught the error.
    """

    supports_higher_order_operators = True

    def __init__(self, listener: LaunchListener | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.thread = threading.get_ident()
        self.launches: list[Launch] = []
        self.failure: BaseException | None = None
        self._listener = listener
        self._memory = HostMemory()
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled: their launches are recorded, not their ops."""
        return True

    @staticmethod
    def on_this_thread() -> HostRecorder | None:
        """The recorder of the capture that this thread is in."""
        for mode in _mode_stack():
            if isinstance(mode, HostRecorder):
                return mode
        return None

    def start(self) -> None:
        """Begin to record, with the random state as it is now to come back at ``stop``."""
        self._remember(torch.default_generator)
        _with_user_modes_off(lambda: _push_mode(self))

    def stop(self) -> None:
        """Take the mode off this thread and put random states back."""
        above = [mode for mode in _user_modes() if mode is not self]
        for _ in range(len(above) + 1):
            _pop_mode()
        for mode in above:
            _push_mode(mode)
        with plain_kernels():
            for generator, state in self._generators.values():
                generator.set_state(state)
        self._generators.clear()
        self._memory = HostMemory()

    # Operators

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(_dispatches_itself(kind) for kind in types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        if _is_tracing():
            return func(*args, **kwargs)
        try:
            return self._run(func, args, kwargs)
        except CaptureError as error:
            self.failure = self.failure or error
            raise

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, OpOverload):
            raise CaptureError(higher_order_refusal(str(func)))
        role = role_of(func)
        if role is Role.COMPOSITE:
            with self:
                return func.decompose(*args, **kwargs)
        refuse_uncapturable(func, args, kwargs, is_born=self._is_born)
        match role:
            case Role.METADATA:
                return func(*args, **kwargs)
            case Role.ALLOCATION:
                with torch._C._InferenceMode(False):
                    result = func(*args, **kwargs)
                for tensor in tensors_in(result):
                    self._memory.add_born(tensor)
                return result
            case Role.CONSTANT:
                # A tensor made from Python data: every replay starts from that data.
                return self._launch(torch.ops.aten.clone.default, args, {}, called=func)
            case Role.PYTHON:
                with self, torch._C._AutoDispatchBelowAutograd():
                    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                    return func.redispatch(cpu, *args, **kwargs)
        return self._launch(func, args, kwargs, called=func)

    def _launch(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], called: OpOverload) -> Any:
        """Run ``func`` where nobody outside sees it, and record it."""
        with plain_kernels():
            written = written_arguments(func, args, kwargs)
            for generator in (v for v in (*args, *kwargs.values()) if _is_generator(v)):
                self._remember(generator)
            for tensor in written:
                self._memory.protect(tensor)
            borrowed = Borrowed()
            used_args = self._memory.borrow(args, borrowed)
            used_kwargs = self._memory.borrow(kwargs, borrowed)
            result = func(*used_args, **used_kwargs)
            for original, used in borrowed.pairs():
                _refuse_resized(called, original, used)
            refuse_other_memory(called, tensors_in(result))
            result, new = self._memory.give_back(result, borrowed)
            outputs = tuple((i, retained(t)) for i, t in enumerate(new) if t is not None)
            filled = [*written, *(buffer for _, buffer in outputs)]
            if all(tensor.numel() == 0 for tensor in filled) and not _only_checks(func):
                return result  # nothing to run, as on CUDA
            index = len(self.launches)
            node = describe(index, str(called), called._schema.name, args, filled)
            function: Any = func
            if func._schema.name == "aten::zeros":
                function, args, kwargs, outputs = torch.ops.aten.zero_.default, (filled[0],), {}, ()
            launch = Launch(
                function=function,
                args=map_tensors(args, retained),
                kwargs=map_tensors(kwargs, retained),
                outputs=outputs,
                node=node,
            )
        self._record(launch)
        return result

    # Compiled kernels

    def launch_kernel(
        self, name: str, kernel: Callable[..., Any], args: tuple[Any, ...], writes: Sequence[bool]
    ) -> None:
        """A generated kernel was called; ``writes`` says which arguments it may write."""
        with plain_kernels():
            for arg, is_written in zip(args, writes, strict=True):
                if is_written and isinstance(arg, Tensor):
                    self._memory.protect(arg)
            kernel(*self._memory.borrow(args, Borrowed()))
            launch = Launch(
                function=kernel,
                args=map_tensors(args, retained),
                node=describe(len(self.launches), name, "", args, ()),
            )
        self._record(launch)

    def allocate(self, allocate: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """Generated code allocates a buffer behind the dispatcher's back."""
        with torch._C._InferenceMode(False):
            buffer = allocate(*args)
        self._memory.add_born(buffer)
        return buffer

    # What both share

    def _record(self, launch: Launch) -> None:
        self.launches.append(launch)
        if self._listener is None:
            return
        try:
            self._listener(0, launch.node.index)
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def outside_memory(self) -> list[tuple[Tensor, int]]:
        """Memory from outside that launches use, until ``stop``: a tensor on each storage, and how
        many of the launches' tensors hold it."""
        held: dict[int, list[Tensor]] = {}
        for launch in self.launches:
            for tensor in tensors_in((list(launch.args), dict(launch.kwargs))):
                if tensor.layout == torch.strided and not self._is_born(tensor):
                    held.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        return [(tensors[0], len(tensors)) for tensors in held.values()]

    def _is_born(self, tensor: Tensor) -> bool:
        return self._memory.is_born(tensor)

    def _remember(self, generator: torch.Generator) -> None:
        if id(generator) not in self._generators:
            self._generators[id(generator)] = (generator, generator.get_state())


def _mode_stack() -> list[Any]:
    size = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(i) for i in range(size)]


def _user_modes() -> list[Any]:
    """Modes that are not part of tracing, lowest first."""
    return [mode for mode in _mode_stack() if getattr(mode, "_mode_key", None) is None]


def _with_user_modes_off(action: Callable[[], None]) -> None:
    modes = _user_modes()
    for _ in modes:
        _pop_mode()
    action()
    for mode in modes:
        _push_mode(mode)


def _is_tracing() -> bool:
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))


def _dispatches_itself(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator) and value.device.type == "cpu"


def _only_checks(func: OpOverload) -> bool:
    return "aten::_assert_async" in func._schema.name


def _refuse_resized(func: OpOverload, original: Tensor, used: Tensor) -> None:
    if used is not original and used.shape != original.shape:
        raise CaptureError(
            f"{func} would resize a tensor from outside the capture from "
            f"{tuple(original.shape)} to {tuple(used.shape)}; give it its final shape before "
            "the capture begins"
        )
