"""Graphs built node by node through the driver: kinds that no PyTorch op makes."""

from __future__ import annotations

import ctypes
from typing import Any

PTX = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry first_kernel() { ret; }
.visible .entry second_kernel() { ret; }
\0"""


def ok(answer: Any) -> Any:
    """What a driver call gave; its result has to be success."""
    result, *values = answer
    assert int(result) == 0, result.name
    return values[0] if len(values) == 1 else tuple(values)


class DriverGraph:
    """An empty ``cudaGraph_t`` of the current context, and ways to add nodes to it."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver = driver
        self.graph = ok(driver.cuGraphCreate(0))
        self._alive: list[Any] = []  # modules, callbacks and events that nodes point to

    @property
    def handle(self) -> int:
        return int(self.graph)

    def close(self) -> None:
        ok(self.driver.cuGraphDestroy(self.graph))
        self._alive.clear()

    def empty(self, *after: Any) -> Any:
        return ok(self.driver.cuGraphAddEmptyNode(self.graph, list(after), len(after)))

    def functions(self) -> tuple[Any, Any]:
        module = ok(self.driver.cuModuleLoadData(PTX))
        return tuple(ok(self.driver.cuModuleGetFunction(module, name)) for name in (b"first_kernel", b"second_kernel"))

    def kernel(self, function: Any, *after: Any, grid: int = 2, shared: int = 0) -> Any:
        params = self.driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = function
        params.gridDimX, params.gridDimY, params.gridDimZ = grid, 1, 1
        params.blockDimX, params.blockDimY, params.blockDimZ = 32, 2, 1
        params.sharedMemBytes = shared
        params.kernelParams = 0
        return ok(self.driver.cuGraphAddKernelNode(self.graph, list(after), len(after), params))

    def set_cluster(self, node: Any, x: int) -> None:
        value = self.driver.CUkernelNodeAttrValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = x, 1, 1
        attribute = self.driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        ok(self.driver.cuGraphKernelNodeSetAttribute(node, attribute, value))

    def programmatic_edge(self, before: Any, after: Any) -> None:
        edge = self.driver.CUgraphEdgeData()
        edge.type = self.driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
        edge.from_port = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        ok(self.driver.cuGraphAddDependencies(self.graph, [before], [after], [edge], 1))

    def host(self, *after: Any) -> Any:
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
        self._alive.append(function)
        params = self.driver.CUDA_HOST_NODE_PARAMS()
        params.fn = self.driver.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value)
        params.userData = 0
        return ok(self.driver.cuGraphAddHostNode(self.graph, list(after), len(after), params))

    def event_record_and_wait(self, *after: Any) -> tuple[Any, Any]:
        event = ok(self.driver.cuEventCreate(0))
        record = ok(self.driver.cuGraphAddEventRecordNode(self.graph, list(after), len(after), event))
        return record, ok(self.driver.cuGraphAddEventWaitNode(self.graph, [record], 1, event))

    def memset(self, address: int, *after: Any, value: int, element_bytes: int, width: int, height: int = 1) -> Any:
        params = self.driver.CUDA_MEMSET_NODE_PARAMS()
        params.dst = self.driver.CUdeviceptr(address)
        params.value, params.elementSize = value, element_bytes
        params.width, params.height, params.pitch = width, height, width * element_bytes
        return ok(self.driver.cuGraphAddMemsetNode(self.graph, list(after), len(after), params, self._context()))

    def write_two_values(self, address: int, *after: Any) -> Any:
        """One batch: a 32 bit write and a 64 bit write."""
        kinds = self.driver.CUstreamBatchMemOpType
        operations = []
        for kind in (kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, kinds.CU_STREAM_MEM_OP_WRITE_VALUE_64):
            operation = self.driver.CUstreamBatchMemOpParams()
            operation.operation = kind
            operation.writeValue.operation = kind
            operation.writeValue.address = self.driver.CUdeviceptr(address)
            operation.writeValue.value = 7
            operations.append(operation)
        params = self.driver.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        params.ctx, params.count, params.flags = self._context(), len(operations), 0
        params.paramArray = operations
        return ok(self.driver.cuGraphAddBatchMemOpNode(self.graph, list(after), len(after), params))

    def alloc_and_free(self, num_bytes: int, *after: Any) -> tuple[Any, Any]:
        params = self.driver.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.poolProps.allocType = self.driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        params.poolProps.location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        params.poolProps.location.id = 0
        params.bytesize = num_bytes
        alloc = ok(self.driver.cuGraphAddMemAllocNode(self.graph, list(after), len(after), params))
        return alloc, ok(self.driver.cuGraphAddMemFreeNode(self.graph, [alloc], 1, params.dptr))

    def child(self, body: DriverGraph, *after: Any) -> Any:
        """A child graph node; the body is copied."""
        return ok(self.driver.cuGraphAddChildGraphNode(self.graph, list(after), len(after), body.graph))

    def if_node(self) -> Any:
        """An IF node whose body holds one empty node."""
        driver = self.driver
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = ok(driver.cuGraphConditionalHandleCreate(self.graph, self._context(), 0, 0))
        params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        params.conditional.size = 1
        params.conditional.ctx = self._context()
        node = ok(driver.cuGraphAddNode(self.graph, None, None, 0, params))
        ok(driver.cuGraphAddEmptyNode(params.conditional.phGraph_out[0], None, 0))
        return node

    def _context(self) -> Any:
        return ok(self.driver.cuCtxGetCurrent())
