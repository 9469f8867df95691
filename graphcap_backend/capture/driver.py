"""The driver calls that a capture session makes itself, by ctypes on libcuda.

They need no cuda-bindings, so that a capture can be begun, watched and unwound wherever CUDA
runs. Reading nodes is another module's business (``cuda_nodes``).
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from graphcap_backend.errors import CudaError

_Handle = ctypes.c_void_p
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_MEMCPY_NODE = 1  # CU_GRAPH_NODE_TYPE_MEMCPY
_EDGE_DATA_BYTES = 8  # sizeof(CUgraphEdgeData)


class CaptureStatus(IntEnum):
    """``CUstreamCaptureStatus``."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureInfo:
    """What the driver says about the capture on a stream.

    ``graph`` is the ``CUgraph`` under construction and ``capture_id`` its graph id, the same number
    that CUPTI gives (0 and 0 unless active). ``frontier``: nodes that the stream's next work waits for.
    """

    status: CaptureStatus
    capture_id: int = 0
    graph: int = 0
    frontier: tuple[int, ...] = ()


@cache
def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _call(name: str, *args: object) -> None:
    result = getattr(_libcuda(), name)(*args)
    if result != 0:
        raise CudaError(name, _result_name(result))


def _result_name(result: int) -> str:
    text = ctypes.c_char_p()
    if _libcuda().cuGetErrorName(result, ctypes.byref(text)) != 0 or text.value is None:
        return f"CUresult {result}"
    return text.value.decode()


def capture_info(stream: int) -> CaptureInfo:
    """State of the capture on ``stream`` (a raw ``CUstream``). Allowed at any time."""
    status, capture_id, graph = ctypes.c_int(), ctypes.c_uint64(), _Handle()
    frontier, count = ctypes.POINTER(_Handle)(), ctypes.c_size_t()
    _call(
        "cuStreamGetCaptureInfo_v2",
        _Handle(stream),
        ctypes.byref(status),
        ctypes.byref(capture_id),
        ctypes.byref(graph),
        ctypes.byref(frontier),
        ctypes.byref(count),
    )
    if status.value != CaptureStatus.ACTIVE:
        return CaptureInfo(status=CaptureStatus(status.value))
    nodes = tuple(frontier[i] or 0 for i in range(count.value))
    return CaptureInfo(status=CaptureStatus.ACTIVE, capture_id=capture_id.value, graph=graph.value or 0, frontier=nodes)


def begin_empty_capture(stream: int) -> None:
    """Put ``stream`` into capture mode with one empty node, which is cheaper than a warning about none."""
    _call("cuStreamBeginCapture_v2", _Handle(stream), _RELAXED)
    add_empty_node(capture_info(stream).graph)


def drop_capture(stream: int) -> None:
    """Take ``stream`` out of capture mode, whatever its state, and drop what was captured."""
    if capture_info(stream).status is CaptureStatus.NONE:
        return
    graph = _Handle()
    # Unjoined, invalidated: the answer is an error and the stream has left capture mode all the same.
    _libcuda().cuStreamEndCapture(_Handle(stream), ctypes.byref(graph))
    if graph.value:
        _libcuda().cuGraphDestroy(graph)


def graph_nodes(graph: int) -> list[int]:
    """Nodes of a ``CUgraph`` in creation order; it may be under construction."""
    count = ctypes.c_size_t()
    _call("cuGraphGetNodes", _Handle(graph), None, ctypes.byref(count))
    nodes = (ctypes.c_uint64 * count.value)()  # handles, as numbers
    if count.value:
        _call("cuGraphGetNodes", _Handle(graph), nodes, ctypes.byref(count))
    return nodes[:]


def num_nodes(graph: int) -> int:
    """How many nodes a ``CUgraph`` has; it may be under construction."""
    count = ctypes.c_size_t()
    _call("cuGraphGetNodes", _Handle(graph), None, ctypes.byref(count))
    return count.value


def add_empty_node(graph: int) -> None:
    """Add a node that does nothing to a ``CUgraph``, which may be under construction."""
    node = _Handle()
    _call("cuGraphAddEmptyNode", ctypes.byref(node), _Handle(graph), None, ctypes.c_size_t(0))


def graph_exec_id(graph_exec: int) -> int | None:
    """Id of a ``CUgraphExec``, the one CUPTI reports; None where the driver (before 13.1) cannot tell."""
    get_id = getattr(_libcuda(), "cuGraphExecGetId", None)
    value = ctypes.c_uint()
    if get_id is None or get_id(_Handle(graph_exec), ctypes.byref(value)) != 0:
        return None
    return value.value


class MemcpyParams(ctypes.Structure):
    """``CUDA_MEMCPY3D``: of a node's parameters, those that say where it reads are changed."""

    _fields_ = (
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcZ", ctypes.c_size_t),
        ("srcLOD", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", _Handle),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", _Handle),
        ("reserved0", _Handle),
        ("srcPitch", ctypes.c_size_t),
        ("srcHeight", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstZ", ctypes.c_size_t),
        ("dstLOD", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", _Handle),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", _Handle),
        ("reserved1", _Handle),
        ("dstPitch", ctypes.c_size_t),
        ("dstHeight", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
        ("Depth", ctypes.c_size_t),
    )


def is_memcpy(node: int) -> bool:
    """Whether a node of a graph, which may be under construction, copies memory."""
    kind = ctypes.c_int()
    _call("cuGraphNodeGetType", _Handle(node), ctypes.byref(kind))
    return kind.value == _MEMCPY_NODE


def memcpy_params(node: int) -> MemcpyParams:
    """What a memcpy node copies, and where to."""
    params = MemcpyParams()
    _call("cuGraphMemcpyNodeGetParams", _Handle(node), ctypes.byref(params))
    return params


def set_memcpy_params(graph_exec: int, node: int, params: MemcpyParams, context: int) -> None:
    """Change what a memcpy node does in later launches of ``graph_exec``. Launches under way are not affected."""
    _call(
        "cuGraphExecMemcpyNodeSetParams",
        _Handle(graph_exec),
        _Handle(node),
        ctypes.byref(params),
        _Handle(context),
    )


def current_context() -> int:
    """The ``CUcontext`` that is current on this thread."""
    context = _Handle()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value or 0


def edges(graph: int) -> tuple[list[int], list[int]]:
    """Node handles where the edges of a ``CUgraph`` begin, and those where they end."""
    count = ctypes.c_size_t()
    _call("cuGraphGetEdges_v2", _Handle(graph), None, None, None, ctypes.byref(count))
    sources, targets = (ctypes.c_uint64 * count.value)(), (ctypes.c_uint64 * count.value)()
    data = (ctypes.c_ubyte * (_EDGE_DATA_BYTES * count.value))()
    if count.value:
        _call("cuGraphGetEdges_v2", _Handle(graph), sources, targets, data, ctypes.byref(count))
    return sources[:], targets[:]
