"""Copies of inputs that are nodes of the graph: a replay need only say where they read, and only when that changed.

Setting the source of a memcpy node costs a fraction of launching a copy, and a loop that feeds its inputs from the
same memory pays for neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphcap_backend.annotate.stand_in_frame import launch_from
from graphcap_backend.capture import driver
from graphcap_backend.capture.call_watch import CallWatch
from graphcap_backend.errors import CudaError

_MOST = 4
"""More inputs are quicker copied by one launch before the graph: the nodes of a graph copy one after the other."""


_REFUSALS = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED")


class SourceRefusedError(CudaError):
    """The driver does not let a node read from an input's memory. Nothing was replayed."""


class InputCopy:
    """One memcpy node that fills the buffer of input ``index``.

    Attributes:
        index: position among the inputs.
        source: the address that the next replay reads; 0 where that is not known.
    """

    __slots__ = ("_buffer", "_context", "_exec", "_graph", "_like", "_node", "_params", "index", "source")

    def __init__(self, index: int, buffer: Tensor, node: int, graph: Any) -> None:
        self.index = index
        self.source = 0
        # Addresses only: the buffer's memory is the pool's again once the graph is captured.
        self._buffer = buffer.data_ptr()
        self._like = torch.empty_like(buffer, device="meta")
        self._node = node
        self._params = driver.memcpy_params(node)
        self._context = driver.current_context()
        self._graph = weakref.ref(graph)
        self._exec = 0

    def read_from(self, tensor: Tensor) -> Tensor:
        """Have the next replay copy ``tensor``, which is as large as the buffer.

        Returns:
            what it reads, to be held until the graph is launched: a copy may be made on the way.

        Raises:
            SourceRefusedError: the driver does not take its memory.
        """
        if _is_one_stretch(tensor):
            self._read(tensor.data_ptr())
            return tensor
        # A tangent may come in any form.
        copied = torch.empty_like(self._like, device=tensor.device).copy_(tensor)
        self._read(copied.data_ptr())
        self.source = 0
        return copied

    def read_nothing_new(self) -> None:
        """Have the next replay work on what is in the buffer: an input's memory may be gone by then."""
        self._read(self._buffer)

    def forget_exec(self) -> None:
        """The graph is instantiated anew, and its node reads what it read when it was captured."""
        self._exec = self.source = 0

    def _read(self, address: int) -> None:
        if not self._exec:
            graph = self._graph()
            assert graph is not None, "a replay without its graph"
            self._exec = graph.raw_cuda_graph_exec()
        self._params.srcDevice = address
        self.source = 0  # not known, should this be interrupted
        try:
            driver.set_memcpy_params(self._exec, self._node, self._params, self._context)
        except CudaError as error:
            if error.result in _REFUSALS:
                raise SourceRefusedError(error.api, error.result) from None
            raise
        self.source = address


def capture_copies(inputs: Sequence[Any], buffers: dict[int, Tensor], graph: Any, where: str | None) -> list[InputCopy]:
    """Capture the copies of some inputs into ``buffers`` (by position) on the current stream, into ``graph``.

    Not all inputs can be copied so: those that are none in the answer are to be copied before each replay.
    The nodes belong to the user's line ``where``.
    """
    fit = [i for i, buffer in buffers.items() if _is_one_stretch(inputs[i]) and buffer.is_contiguous()]
    if len(fit) > _MOST:
        return []
    stream = torch.cuda.current_stream().cuda_stream
    copies = []
    for i in fit:
        launch_from(where, partial(buffers[i].copy_, inputs[i]))
        (node,) = driver.capture_info(stream).frontier
        if not driver.is_memcpy(node):
            raise SourceRefusedError("Tensor.copy_", "a node that is no memcpy")
        copies.append(InputCopy(i, buffers[i], node, graph))
    return copies


def watch_graph(graph: Any, copies: list[InputCopy], lock: AbstractContextManager[Any]) -> None:
    """Have ``copies`` follow what their user does with the graph itself. Takes ``lock`` for that.

    ``graph.replay()`` of theirs copies nothing: who calls it gives no inputs, and those of the last call may be gone.
    """

    nodes = list(copies)  # their own list: whoever replays meanwhile still goes through ``copies``

    def before_replay() -> None:
        with lock:
            for copy in nodes:
                copy.read_nothing_new()

    def forget_exec() -> None:
        with lock:
            for copy in nodes:
                copy.forget_exec()

    if nodes:
        CallWatch.on(graph, "replay").tell(before_replay)
        # Before, and after: a call of another thread may have asked for the old one in between.
        CallWatch.on(graph, "instantiate").tell(forget_exec, afterwards=True)
        CallWatch.on(graph, "reset").tell(nodes.clear)


def _is_one_stretch(tensor: Tensor) -> bool:
    # A complex tensor's memory may be that of its conjugate at the next call.
    plain = not tensor.is_complex() and not tensor.is_neg()
    return tensor.numel() > 0 and tensor.is_contiguous() and plain
