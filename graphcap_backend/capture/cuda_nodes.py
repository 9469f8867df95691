"""Reads the nodes of a ``cudaGraph_t`` through cuda-bindings.

Works on a graph under capture too. Driver functions only: runtime and driver handles are the same
pointers, and only the driver tells batch memory ops apart.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from graphcap_backend.annotate.shape import does_work
from graphcap_backend.capture.nodes import (
    Conditional,
    Memcpy,
    Memset,
    Node,
    NodeKind,
    NodeList,
)
from graphcap_backend.errors import CudaError

# CUgraphNodeType. By number: a binding older than the driver has no name for the newest.
_KINDS = {
    0: NodeKind.KERNEL,
    1: NodeKind.MEMCPY,
    2: NodeKind.MEMSET,
    3: NodeKind.HOST,
    4: NodeKind.CHILD_GRAPH,
    5: NodeKind.EMPTY,
    6: NodeKind.EVENT_WAIT,
    7: NodeKind.EVENT_RECORD,
    8: NodeKind.SEMAPHORE_SIGNAL,
    9: NodeKind.SEMAPHORE_WAIT,
    10: NodeKind.MEM_ALLOC,
    11: NodeKind.MEM_FREE,
    12: NodeKind.BATCH_MEM_OP,
    13: NodeKind.CONDITIONAL,
}
_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
_MEMORY = {1: "host", 2: "device", 3: "array", _UNIFIED: "unified"}


def read_cuda_nodes(cuda_graph: int) -> NodeList:
    """All nodes of a graph in creation order, bodies of child graphs included.

    ``cuda_graph`` is a raw ``cudaGraph_t``; it is only read, and may be under capture.

    Raises:
        CudaError: a driver call failed; it names the call and the result.
    """
    return NodeList(_Reader(_driver()).nodes(cuda_graph))


def read_body_ids(cuda_graph: int) -> dict[int, int]:
    """CUPTI's ids of the nodes in bodies that do work, each with the index of the top-level node it lies in.

    Bodies are graphs of their own, with ids of their own. Needs a driver for CUDA 13.1.

    Raises:
        CudaError: as ``read_cuda_nodes``; names the driver needed where this one is older.
    """
    reader = _Reader(_driver())
    handles = reader.handles(reader.graph(cuda_graph))
    return {node_id: index for index, handle in enumerate(handles) for node_id in reader.ids_inside(handle)}


def clone_cuda_graph(cuda_graph: int) -> int:
    """A copy of a graph, nodes in the same order. The caller owns it: ``destroy_cuda_graph``.

    Raises:
        CudaError: the driver could not clone it.
    """
    driver = _driver()
    return int(_call(driver, "cuGraphClone", driver.CUgraph(cuda_graph)))


def destroy_cuda_graph(cuda_graph: int) -> None:
    """Free a graph made by ``clone_cuda_graph``.

    Raises:
        CudaError: the handle is no graph.
    """
    driver = _driver()
    _call(driver, "cuGraphDestroy", driver.CUgraph(cuda_graph))


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaError("import cuda.bindings", "ImportError", "pip install cuda-bindings") from error
    return driver


def _binding_version() -> str:
    try:
        return importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


_SINCE = {"cuGraphNodeGetToolsId": "13.1", "cuGraphNodeGetParams": "13.2"}
"""Version of CUDA that a driver must be for to have the call. Drivers without the others are not supported."""


def _answer(driver: Any, api: str, *arguments: Any) -> Sequence[Any]:
    """Make a driver call; its result comes first.

    Raises:
        CudaError: cuda-bindings, or the driver below it, has no such function, or there is no driver.
    """
    function = getattr(driver, api, None)
    if function is None:
        raise CudaError(
            api,
            f"cuda-bindings {_binding_version()}, which has no such function",
            "Nodes are read with cuda-bindings of CUDA 13: pip install --upgrade cuda-bindings",
        )
    try:
        answer: Sequence[Any] = function(*arguments)
    except RuntimeError as error:  # all that cuda-bindings raises by itself: it could not get at the function
        advice = f"That needs a driver for CUDA {_SINCE.get(api, '13.0')} or later; `nvidia-smi` shows which there is"
        raise CudaError(api, f"cuda-bindings' error ({error})", advice) from error
    return answer


def _call(driver: Any, api: str, *arguments: Any) -> Any:
    """What a driver call gives besides its result. Raises: as ``_answer``; also if the result is an error."""
    return _checked(api, _answer(driver, api, *arguments))


def _checked(api: str, answer: Sequence[Any]) -> Any:
    """What a call gave besides its result: nothing, one value, or a tuple."""
    result, *values = answer
    if int(result):
        raise CudaError(api, result.name)
    return values[0] if len(values) == 1 else tuple(values)


class _Reader:
    """One reading of a graph and its bodies; knows each kernel's name once."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._names: dict[tuple[int, int], str] = {}
        self._readers: dict[NodeKind, Callable[[Any], dict[str, Any]]] = {
            NodeKind.KERNEL: self._kernel,
            NodeKind.MEMCPY: self._memcpy,
            NodeKind.MEMSET: self._memset,
            NodeKind.BATCH_MEM_OP: self._batch_mem_op,
            NodeKind.MEM_ALLOC: self._mem_alloc,
            NodeKind.CHILD_GRAPH: self._child_graph,
            NodeKind.CONDITIONAL: self._conditional,
        }

    def nodes(self, cuda_graph: int, first: int = 0) -> list[Node]:
        """The nodes of one graph; their indices count from ``first``."""
        graph = self.graph(cuda_graph)
        handles = self.handles(graph)
        index_of = {int(handle): first + i for i, handle in enumerate(handles)}
        waits, programmatic = self._edges(graph, index_of)
        nodes = []
        for index, handle in enumerate(handles, first):
            kind, name = self._kind(handle)
            read = self._readers.get(kind)
            found = {"name": name} if read is None else {"name": name, **read(handle)}
            nodes.append(
                Node(
                    index=index,
                    kind=kind,
                    dependencies=tuple(sorted(waits.get(index, ()))),
                    programmatic_dependencies=tuple(sorted(programmatic.get(index, ()))),
                    **found,
                )
            )
        return nodes

    def _call(self, api: str, *arguments: Any) -> Any:
        return _call(self._driver, api, *arguments)

    def graph(self, cuda_graph: int) -> Any:
        return self._driver.CUgraph(cuda_graph)

    def handles(self, graph: Any) -> list[Any]:
        _, number = self._call("cuGraphGetNodes", graph, 0)
        if not number:
            return []
        handles, number = self._call("cuGraphGetNodes", graph, number)
        return list(handles[:number])

    def _edges(self, graph: Any, index_of: dict[int, int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """For each node what it waits for, and which of these edges are programmatic."""
        # cuda-bindings 12 has the call that gives edge data under another name.
        api = "cuGraphGetEdges_v2" if hasattr(self._driver, "cuGraphGetEdges_v2") else "cuGraphGetEdges"
        number = self._call(api, graph, 0)[-1]
        waits: dict[int, list[int]] = {}
        programmatic: dict[int, list[int]] = {}
        if not number:
            return waits, programmatic
        sources, targets, data, number = self._call(api, graph, number)
        for source, target, edge in zip(sources[:number], targets[:number], data[:number], strict=True):
            before, after = index_of[int(source)], index_of[int(target)]
            # Two nodes may have several edges between them, from different ports.
            if before not in (known := waits.setdefault(after, [])):
                known.append(before)
            if int(edge.type) == _PROGRAMMATIC and before not in (early := programmatic.setdefault(after, [])):
                early.append(before)
        return waits, programmatic

    def _kind(self, handle: Any) -> tuple[NodeKind, str]:
        """The kind, and the name of a node that has no other."""
        try:
            number = self._call("cuGraphNodeGetType", handle)
        except ValueError:  # the binding has no name for what the driver answered
            return NodeKind.UNKNOWN, NodeKind.UNKNOWN.value
        kind = _KINDS.get(int(number))
        if kind is None:
            return NodeKind.UNKNOWN, number.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        return kind, kind.value

    def _kernel(self, handle: Any) -> dict[str, Any]:
        params = self._call("cuGraphKernelNodeGetParams", handle)
        return {
            "name": self._kernel_name(params),
            "grid": (params.gridDimX, params.gridDimY, params.gridDimZ),
            "block": (params.blockDimX, params.blockDimY, params.blockDimZ),
            "shared_mem_bytes": params.sharedMemBytes,
            "cluster": self._cluster(handle),
        }

    def _kernel_name(self, params: Any) -> str:
        function, kernel = int(params.func), int(params.kern)
        name = self._names.get((function, kernel))
        if name is None:
            if function:
                raw = self._call("cuFuncGetName", params.func)
            elif kernel:
                raw = self._call("cuKernelGetName", params.kern)
            else:
                raw = b"kernel"
            name = self._names[function, kernel] = raw.decode(errors="replace")
        return name

    @cached_property
    def _cluster_attribute(self) -> Any:
        driver = self._driver
        ids = getattr(driver, "CUkernelNodeAttrID", None) or driver.CUlaunchAttributeID
        return (
            getattr(ids, "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION", None)
            or ids.CU_KERNEL_NODE_ATTRIBUTE_CLUSTER_DIMENSION
        )

    def _cluster(self, handle: Any) -> tuple[int, int, int] | None:
        api = "cuGraphKernelNodeGetAttribute"
        result, value = _answer(self._driver, api, handle, self._cluster_attribute)
        if result.name in ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED"):
            return None  # a device without clusters
        if int(result):
            raise CudaError(api, result.name)
        dims = value.clusterDim
        cluster = (dims.x, dims.y, dims.z)
        return cluster if all(cluster) else None

    def _memcpy(self, handle: Any) -> dict[str, Any]:
        params = self._call("cuGraphMemcpyNodeGetParams", handle)
        num_bytes = params.WidthInBytes * max(params.Height, 1) * max(params.Depth, 1)
        return {
            "memcpy": Memcpy(
                source=self._memory(params.srcMemoryType, params.srcDevice),
                destination=self._memory(params.dstMemoryType, params.dstDevice),
                num_bytes=num_bytes,
            )
        }

    def _memory(self, memory_type: Any, address: Any) -> str:
        """Where one side of a copy lies; an address of no stated kind is looked up."""
        number = int(memory_type)
        if number == _UNIFIED:
            attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
            # Fails for memory that CUDA does not know: pageable, or freed since.
            result, found = _answer(self._driver, "cuPointerGetAttribute", attribute, address)
            if not int(result):
                number = int(found)
        return _MEMORY.get(number, "unknown")

    def _memset(self, handle: Any) -> dict[str, Any]:
        params = self._call("cuGraphMemsetNodeGetParams", handle)
        size = params.elementSize
        return {
            "memset": Memset(
                value=params.value,
                element_bytes=size,
                num_bytes=size * params.width * max(params.height, 1),
            )
        }

    def _batch_mem_op(self, handle: Any) -> dict[str, Any]:
        params = self._call("cuGraphBatchMemOpNodeGetParams", handle)
        names = []
        for number in _mem_op_numbers(params):
            try:
                name = self._driver.CUstreamBatchMemOpType(number).name
            except ValueError:  # newer than the binding
                name = f"operation_{number}"
            names.append(name.removeprefix("CU_STREAM_MEM_OP_").lower())
        return {"mem_ops": tuple(names)}

    def _mem_alloc(self, handle: Any) -> dict[str, Any]:
        return {"alloc_bytes": self._call("cuGraphMemAllocNodeGetParams", handle).bytesize}

    def _child_graph(self, handle: Any) -> dict[str, Any]:
        child = self._call("cuGraphChildGraphNodeGetGraph", handle)
        return {"body": NodeList(self.nodes(int(child)))}

    def _conditional(self, handle: Any) -> dict[str, Any]:
        params = self._conditional_params(handle)
        if params is None:
            return {"conditional": Conditional(decides="unknown")}
        bodies: list[Node] = []
        sizes = []
        for graph in params.phGraph_out[: params.size]:
            body = self.nodes(int(graph), first=len(bodies))
            bodies.extend(body)
            sizes.append(len(body))
        decides = params.type.name.removeprefix("CU_GRAPH_COND_TYPE_").lower()
        return {
            "conditional": Conditional(decides=decides, body_sizes=tuple(sizes)),
            "body": NodeList(bodies),
        }

    def ids_inside(self, handle: Any) -> Iterator[int]:
        """CUPTI's ids of the nodes in the bodies of one node."""
        kind, _ = self._kind(handle)
        bodies: Sequence[Any] = ()
        if kind is NodeKind.CHILD_GRAPH:
            bodies = [self._call("cuGraphChildGraphNodeGetGraph", handle)]
        elif kind is NodeKind.CONDITIONAL and (params := self._conditional_params(handle)) is not None:
            bodies = params.phGraph_out[: params.size]
        for body in bodies:
            for inside in self.handles(body):
                if does_work(self._kind(inside)[0]):
                    yield int(self._call("cuGraphNodeGetToolsId", inside))
                yield from self.ids_inside(inside)

    def _conditional_params(self, handle: Any) -> Any | None:
        """Parameters of a conditional node; None where driver or binding cannot tell."""
        try:
            result, params = _answer(self._driver, "cuGraphNodeGetParams", handle)
        except CudaError:
            return None
        if result.name in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"):
            return None
        return _checked("cuGraphNodeGetParams", (result, params)).conditional


class _BatchMemOps(ctypes.Structure):
    """CUDA_BATCH_MEM_OP_NODE_PARAMS. cuda-bindings shows the array only to who has set it."""

    _fields_ = (
        ("ctx", ctypes.c_void_p),
        ("count", ctypes.c_uint),
        ("operations", ctypes.c_void_p),
        ("flags", ctypes.c_uint),
    )


_MEM_OP_BYTES = 48  # sizeof(CUstreamBatchMemOpParams); each begins with the operation's number


def _mem_op_numbers(params: Any) -> list[int]:
    ops = _BatchMemOps.from_address(params.getPtr())
    if not ops.operations:
        return []
    addresses = (ops.operations + i * _MEM_OP_BYTES for i in range(ops.count))
    return [ctypes.c_uint.from_address(address).value for address in addresses]
