"""Every kind of node, read back from the driver."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from helpers.driver_graph import DriverGraph, ok

from graphcap_backend.capture.cuda_nodes import clone_cuda_graph, destroy_cuda_graph, read_body_ids, read_cuda_nodes
from graphcap_backend.capture.nodes import Memcpy, Memset, NodeKind
from graphcap_backend.errors import CudaError


@pytest.fixture(autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("cuda.bindings.driver")
    torch.zeros(1, device="cuda")  # the primary context is current from here on


@pytest.fixture
def built() -> Iterator[DriverGraph]:
    graph = DriverGraph()
    yield graph
    graph.close()


def needs_hopper() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0: clusters, programmatic launch")


def capture(work: object) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    assert callable(work)
    with torch.cuda.graph(graph):
        work()
    return graph


def test_kernels_copies_and_fills_of_torch() -> None:
    x = torch.randn(256, 256, device="cuda")
    y = torch.empty_like(x)
    host = torch.empty(256, 256, pin_memory=True)
    raw = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")

    def work() -> None:
        from cuda.bindings import runtime

        torch.add(x, 1, out=y)
        x.copy_(y)
        host.copy_(y, non_blocking=True)
        y.copy_(host, non_blocking=True)
        ok(runtime.cudaMemsetAsync(raw.data_ptr(), 7, 1024, torch.cuda.current_stream().cuda_stream))

    graph = capture(work)
    nodes = read_cuda_nodes(graph.raw_cuda_graph())
    kernel, on_device, to_host, to_device, fill = nodes
    assert [node.index for node in nodes] == [0, 1, 2, 3, 4]
    assert [node.dependencies for node in nodes] == [(), (0,), (1,), (2,), (3,)]
    assert kernel.kind is NodeKind.KERNEL
    assert "vectorized_elementwise_kernel" in kernel.name
    assert kernel.grid is not None
    assert kernel.block is not None
    assert kernel.grid[0] * kernel.block[0] * 16 >= 256 * 256  # at most 16 elements a thread
    assert kernel.cluster is None
    num_bytes = 256 * 256 * 4
    assert on_device.memcpy == Memcpy(source="device", destination="device", num_bytes=num_bytes)
    assert to_host.memcpy == Memcpy(source="device", destination="host", num_bytes=num_bytes)
    assert to_device.memcpy == Memcpy(source="host", destination="device", num_bytes=num_bytes)
    assert fill.memset == Memset(value=7, element_bytes=1, num_bytes=1024)
    assert fill.kind is NodeKind.MEMSET
    assert nodes.render() == read_cuda_nodes(capture(work).raw_cuda_graph()).render()


def test_forks_and_joins_are_edges_and_external_events_are_nodes() -> None:
    x = torch.zeros(8, device="cuda")
    y = torch.zeros(8, device="cuda")
    side = torch.cuda.Stream()
    event = torch.cuda.Event(external=True)

    def work() -> None:
        main = torch.cuda.current_stream()
        x.add_(1)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y.add_(1)
        x.mul_(2)
        main.wait_stream(side)
        x.add_(y)
        event.record()

    graph = capture(work)
    nodes = read_cuda_nodes(graph.raw_cuda_graph())
    assert [node.dependencies for node in nodes] == [(), (0,), (0,), (1, 2), (3,)]
    assert nodes[4].kind is NodeKind.EVENT_RECORD
    assert all(not node.programmatic_dependencies for node in nodes)


def test_a_graph_under_capture_and_its_clone_read_alike() -> None:
    from cuda.bindings import driver

    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            x.add_(1)
        under_capture = int(ok(driver.cuStreamGetCaptureInfo(torch.cuda.current_stream().cuda_stream))[2])
        nodes = read_cuda_nodes(under_capture)
        clone = clone_cuda_graph(under_capture)
    assert len(nodes) == 5
    assert read_cuda_nodes(clone) == nodes
    destroy_cuda_graph(clone)
    graph.replay()
    assert x.tolist() == [5.0] * 8


def test_kinds_that_no_op_makes(built: DriverGraph) -> None:
    memory = torch.zeros(1024, dtype=torch.int32, device="cuda")
    first = built.empty()
    second = built.host(first)
    record, wait = built.event_record_and_wait(second)
    built.memset(memory.data_ptr(), wait, value=0x0102, element_bytes=2, width=8, height=4)
    built.write_two_values(memory.data_ptr(), record)
    built.alloc_and_free(4096, first)
    nodes = read_cuda_nodes(built.handle)
    assert [node.kind for node in nodes] == [
        NodeKind.EMPTY,
        NodeKind.HOST,
        NodeKind.EVENT_RECORD,
        NodeKind.EVENT_WAIT,
        NodeKind.MEMSET,
        NodeKind.BATCH_MEM_OP,
        NodeKind.MEM_ALLOC,
        NodeKind.MEM_FREE,
    ]
    assert [node.dependencies for node in nodes] == [(), (0,), (1,), (2,), (3,), (2,), (0,), (6,)]
    assert nodes[4].memset == Memset(value=0x0102, element_bytes=2, num_bytes=64)
    assert nodes[5].mem_ops == ("write_value_32", "write_value_64")
    assert nodes[6].alloc_bytes == 4096
    assert nodes[1].name == "host"


def test_launch_shape_cluster_and_programmatic_edge(built: DriverGraph) -> None:
    needs_hopper()
    one, two = built.functions()
    a = built.kernel(one, grid=4, shared=256)
    b = built.kernel(two)
    built.kernel(one, a)
    built.set_cluster(a, 2)
    built.programmatic_edge(a, b)
    first, second, third = read_cuda_nodes(built.handle)
    assert (first.name, second.name, third.name) == ("first_kernel", "second_kernel", "first_kernel")
    assert (first.grid, first.block, first.shared_mem_bytes) == ((4, 1, 1), (32, 2, 1), 256)
    assert (first.cluster, second.cluster) == ((2, 1, 1), None)
    assert second.dependencies == second.programmatic_dependencies == (0,)
    assert third.dependencies == (0,)
    assert third.programmatic_dependencies == ()


def test_child_graphs_hold_their_nodes(built: DriverGraph) -> None:
    inner, middle = DriverGraph(), DriverGraph()
    inner.empty(inner.empty())
    middle.child(inner, middle.empty())
    built.child(middle, built.empty())
    child = read_cuda_nodes(built.handle)[1]
    assert child.kind is NodeKind.CHILD_GRAPH
    assert child.body is not None
    assert [node.kind for node in child.body] == [NodeKind.EMPTY, NodeKind.CHILD_GRAPH]
    innermost = child.body[1].body
    assert innermost is not None
    assert [(node.index, node.dependencies) for node in innermost] == [(0, ()), (1, (0,))]
    inner.close()
    middle.close()


def test_ids_of_nodes_in_bodies_are_those_of_the_bodies_graphs(built: DriverGraph) -> None:
    inner, middle = DriverGraph(), DriverGraph()
    inner.host(inner.host())
    middle.child(inner, middle.host())
    built.child(middle, built.empty())
    try:
        found = read_body_ids(built.handle)
    except CudaError as error:
        pytest.skip(f"needs a driver for CUDA 13.1: {error}")
    assert list(found.values()) == [1] * 3
    assert sorted(node_id & 0xFFFFFFFF for node_id in found) == [0, 0, 1]
    assert len({node_id >> 32 for node_id in found}) == 2  # two bodies, copies with numbers of their own
    inner.close()
    middle.close()


def test_no_bodies_no_ids(built: DriverGraph) -> None:
    built.host(built.empty())
    assert read_body_ids(built.handle) == {}


def test_a_conditional_lists_its_bodies_where_the_driver_can(built: DriverGraph) -> None:
    built.if_node()
    (node,) = read_cuda_nodes(built.handle)
    assert node.kind is NodeKind.CONDITIONAL
    assert node.conditional is not None
    if node.conditional.decides == "unknown":  # before driver 13.2
        assert node.body is None
    else:
        assert node.conditional.decides == "if"
        assert node.conditional.body_sizes == (1,)
        assert node.body is not None
        assert [inner.kind for inner in node.body] == [NodeKind.EMPTY]


def test_no_nodes_and_no_graph(built: DriverGraph) -> None:
    assert len(read_cuda_nodes(built.handle)) == 0
    with pytest.raises(CudaError, match="cuGraphGetNodes failed with CUDA_ERROR_INVALID_VALUE"):
        read_cuda_nodes(0)


def test_ten_thousand_nodes_in_a_second() -> None:
    x = torch.zeros(64, device="cuda")

    def work() -> None:
        for _ in range(10_000):
            x.add_(1)

    graph = capture(work)
    handle = graph.raw_cuda_graph()
    read_cuda_nodes(handle)
    start = time.perf_counter()
    nodes = read_cuda_nodes(handle)
    read = time.perf_counter() - start
    text = nodes.render()
    rendered = time.perf_counter() - start - read
    assert len(nodes) == 10_000
    assert text.count("\n") == 10_000
    assert read < 1
    assert rendered < 2
