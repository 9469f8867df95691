"""Scopes and stacks of CUDA captures; each program has a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fresh_process import needs_cuda, run_fresh


@pytest.fixture(autouse=True)
def _cuda() -> None:
    needs_cuda()


MLP = """
def layer(x, w):
    return torch.relu(x @ w)

def forward(x, w1, w2):
    with mark_kernels({"name": "first", "cost": {"flops": 1}}):
        x = layer(x, w1)
        with mark_kernels({"cost": {"bytes": 2}}):
            x = x.sigmoid()
    with mark_kernels("second"):
        x = layer(x, w2)
    return x

x = torch.randn(32, 64, device="cuda")
w1 = torch.randn(64, 64, device="cuda", requires_grad=True)
w2 = torch.randn(64, 64, device="cuda", requires_grad=True)

def train():
    w1.grad = w2.grad = None
    forward(x, w1, w2)[:, 0].sum().backward()

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        train()
torch.cuda.current_stream().wait_stream(side)
"""


def test_scopes_and_stacks_of_forward_and_backward(tmp_path: Path) -> None:
    run_fresh(
        MLP
        + """
g = capture(train, STACKS)
nodes = [node for node in capture_nodes(g) if node.kind in WORK]
phases = [(node.annotation or {}).get("autograd_phase") for node in nodes]
first_backward = phases.index("backward")
for node in nodes[:first_backward]:
    assert "train" in functions(node), node
    assert (node.annotation is not None) == ("forward" in functions(node)), node
names = {(node.annotation or {}).get("name") for node in nodes[first_backward:]}
assert {"first", "second"} <= names, names
for node in nodes[first_backward:]:
    if (node.annotation or {}).get("autograd_phase") == "backward":
        # Launched on autograd's worker thread, with a line of the forward all the same.
        assert "forward" in functions(node), node
        assert node.annotation["name"] in ("first", "second")
    assert node.sources or node.annotation is None, node
inner = [n for n in nodes if (n.annotation or {}).get("cost") == {"flops": 1, "bytes": 2}]
assert {(n.annotation or {}).get("autograd_phase") for n in inner} == {None, "backward"}
# What a view's backward launches has the view's line.
assert [n for n in nodes[first_backward - 4:] if functions(n)[:1] == ["train"] and n.annotation is None]
g.replay()
torch.cuda.synchronize()
""",
        tmp_path,
    )


def test_both_ways_of_finding_nodes_agree(tmp_path: Path) -> None:
    run_fresh(
        MLP
        + """
found = []
for backend in ("cupti", "edge_walk", "auto"):
    g = capture(train, {"backend": backend})
    found.append([(node.kind, node.name, node.annotation) for node in capture_nodes(g)])
assert found[0] == found[1] == found[2], list(zip(*found))
assert any((annotation or {}).get("autograd_phase") for _, _, annotation in found[0])
""",
        tmp_path,
    )


def test_higher_orders_and_checkpoints_inherit(tmp_path: Path) -> None:
    run_fresh(
        """
from torch.utils.checkpoint import checkpoint
x = torch.randn(8, device="cuda", requires_grad=True)

def twice():
    with mark_kernels("a"):
        y = x.sigmoid().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    torch.autograd.grad(grad.sum(), x)

def recomputed():
    with mark_kernels("b"):
        y = checkpoint(lambda x: x.sigmoid().tanh(), x, use_reentrant=False)
    torch.autograd.grad(y.sum(), x)

for work, name in ((twice, "a"), (recomputed, "b")):
    for _ in range(2):
        work()
    for backend in ("cupti", "edge_walk"):
        g = capture(work, {"backend": backend})
        named = [node for node in capture_nodes(g) if any(
            part in node.name for part in ("sigmoid", "tanh")
        )]
        assert len(named) >= 3, capture_nodes(g)
        for node in named:
            assert node.annotation is not None and node.annotation["name"] == name, (backend, node)
""",
        tmp_path,
    )


def test_keys_join_activity_records_after_every_instantiate(tmp_path: Path) -> None:
    run_fresh(
        MLP
        + """
g = capture(train, STACKS)
nodes = capture_nodes(g)
work = {node.index for node in nodes if node.kind in WORK}
from cupti import cupti
found = []
cupti.activity_register_callbacks(
    lambda: (8 << 20, 0), lambda records: found.extend(record.graph_node_id for record in records)
)
kinds = [getattr(cupti.ActivityKind, kind) for kind in ("CONCURRENT_KERNEL", "MEMCPY", "MEMSET")]
for kind in kinds:
    cupti.activity_enable(kind)
seen = set()
for _ in range(2):
    g.instantiate()
    found.clear()
    g.replay()
    torch.cuda.synchronize()
    cupti.activity_flush_all(1)
    stacks, annotations = get_kernel_py_stacks(), get_kernel_annotations()
    assert {key & 0xFFFFFFFF for key in found} == work
    for key in found:
        node = nodes[key & 0xFFFFFFFF]
        assert stacks.get(key) == node.stack
        assert annotations.get(key) == (None if node.annotation is None else [node.annotation])
    seen.add(found[0] >> 32)
    assert {key >> 32 for key in stacks} == {found[0] >> 32}
assert len(seen) == 2
""",
        tmp_path,
    )


def test_bodies_of_child_graphs_join_too(tmp_path: Path) -> None:
    run_fresh(
        """
from cuda.bindings import runtime
x = torch.zeros(8, device="cuda")

def ok(answer):
    assert answer[0] == runtime.cudaError_t.cudaSuccess, answer
    return answer[1:]

def raw(work):
    g = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(g):
        work()
    return g

def adds(count):
    return raw(lambda: [x.add_(1) for _ in range(count)])

def child(body):
    stream = torch.cuda.current_stream().cuda_stream
    info = ok(runtime.cudaStreamGetCaptureInfo(stream))
    graph_, dependencies = info[2], info[3][: info[-1]]
    (node,) = ok(runtime.cudaGraphAddChildGraphNode(graph_, dependencies, len(dependencies), body.raw_cuda_graph()))
    ok(runtime.cudaStreamUpdateCaptureDependencies(
        stream, [node], None, 1, runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
    ))

inner, three = adds(2), adds(3)
nested = raw(lambda: (x.sub_(1), child(inner)))

def work():
    x.mul_(2)
    with mark_kernels("nested"):
        child(nested)
    with mark_kernels("three"):
        child(three)
    x.div_(2)

g = capture(work)
from cupti import cupti
found = []
cupti.activity_register_callbacks(
    lambda: (8 << 20, 0), lambda records: found.extend((record.start, record.graph_node_id) for record in records)
)
cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)
g.replay()
torch.cuda.synchronize()
cupti.activity_flush_all(1)
annotations = get_kernel_annotations()
names = [(annotations.get(key) or [{}])[0].get("name") for _, key in sorted(found)]
assert names == [None] + ["nested"] * 3 + ["three"] * 3 + [None], (names, sorted(found), dict(annotations))
assert set(annotations) <= {key for _, key in found}
by_name = {node.annotation["name"]: node for node in capture_nodes(g) if node.annotation}
assert [node.annotation for node in by_name["three"].body] == [{"name": "three"}] * 3
assert by_name["nested"].body[1].body[0].annotation == {"name": "nested"}
""",
        tmp_path,
    )


def test_a_conditional_is_labelled_and_its_body_has_no_orphans(tmp_path: Path) -> None:
    run_fresh(
        """
from cuda.bindings import driver
x = torch.ones(8, device="cuda")

def ok(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) == 2 else answer[1:]

def if_true_fill_with_zeros():
    stream = torch.cuda.current_stream().cuda_stream
    info = ok(driver.cuStreamGetCaptureInfo(stream))
    graph_, dependencies = info[2], list(info[3][: info[-1]])
    context = ok(driver.cuCtxGetCurrent())
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = ok(driver.cuGraphConditionalHandleCreate(graph_, context, 1, 1))
    params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
    params.conditional.size = 1
    params.conditional.ctx = context
    node = ok(driver.cuGraphAddNode(graph_, dependencies, None, len(dependencies), params))
    fill = driver.CUDA_MEMSET_NODE_PARAMS()
    fill.dst = driver.CUdeviceptr(x.data_ptr())
    fill.value, fill.elementSize, fill.width, fill.height, fill.pitch = 0, 4, 8, 1, 32
    ok(driver.cuGraphAddMemsetNode(params.conditional.phGraph_out[0], None, 0, fill, context))
    ok(driver.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, 1))  # 1: set, do not add

def work():
    with mark_kernels("before"):
        x.add_(1)
    with mark_kernels("conditional"):
        if_true_fill_with_zeros()
    with mark_kernels("after"):
        x.add_(5)

for config in (STACKS, {"backend": "edge_walk"}):
    g = capture(work, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        annotations, stacks = dict(get_kernel_annotations()), dict(get_kernel_py_stacks())
        again = dict(get_kernel_annotations())
    told = [w for w in caught if "conditional" in str(w.message)]
    assert len(told) == (config is STACKS), caught  # once a process
    assert annotations == again
    assert {key & 0xFFFFFFFF: value[0]["name"] for key, value in annotations.items()} == {0: "before", 2: "after"}
    assert set(stacks) == (set(annotations) if config is STACKS else set())
    nodes = capture_nodes(g)
    assert [node.annotation["name"] for node in nodes] == ["before", "conditional", "after"]
    for inside in nodes[1].body or ():
        assert inside.annotation == {"name": "conditional"} and inside.stack == nodes[1].stack
    g.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [5.0] * 8
    del g
""",
        tmp_path,
    )


def test_nodes_of_every_kind_have_the_line_that_made_them(tmp_path: Path) -> None:
    run_fresh(
        """
from cuda.bindings import driver, runtime
x, y = torch.zeros(1 << 12, device="cuda"), torch.ones(1 << 12, device="cuda")
pinned = torch.empty(1 << 12, pin_memory=True)
event = torch.cuda.Event(external=True)
import ctypes
called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)

def ok(answer):
    assert int(answer[0]) == 0, answer

def makes_kernel():
    x.add_(1)

def makes_memset():
    ok(driver.cuMemsetD8Async(x.data_ptr(), 0, x.nbytes, torch.cuda.current_stream().cuda_stream))

def makes_copy_on_device():
    x.copy_(y)

def makes_copy_to_host():
    pinned.copy_(x, non_blocking=True)

def makes_event_record():
    event.record()

def makes_event_wait():
    event.wait()

def makes_host_call():
    function = driver.CUhostFn(ctypes.cast(called, ctypes.c_void_p).value)
    ok(driver.cuLaunchHostFunc(torch.cuda.current_stream().cuda_stream, function, 0))

def makes_batch_mem_op():
    ok(driver.cuStreamWriteValue32(torch.cuda.current_stream().cuda_stream, x.data_ptr(), 7, 0))

expected = {
    makes_kernel: "kernel", makes_memset: "memset", makes_copy_on_device: "memcpy", makes_copy_to_host: "memcpy",
    makes_event_record: "event_record", makes_event_wait: "event_wait", makes_host_call: "host",
    makes_batch_mem_op: "batch_mem_op",
}

def work():
    for number, make in enumerate(expected):
        with mark_kernels(str(number)):
            make()

makes_kernel()
g = capture(work, STACKS)
nodes, stacks = capture_nodes(g), get_kernel_py_stacks()
assert [node.kind for node in nodes] == list(expected.values()), nodes.render()
high = next(iter(stacks)) & ~0xFFFFFFFF
for node, make in zip(nodes, expected):
    line = make.__code__.co_firstlineno + 1
    assert functions(node)[:2] == [make.__name__, "work"], node
    assert node.stack.splitlines()[0].endswith(f"program.py:{line}:{make.__name__}") or node.kind in (
        "host", "batch_mem_op"  # these two have a line of their own more
    ), node
    assert node.sources == (node.stack.splitlines()[0],), node
    assert node.annotation == {"name": str(node.index)}
    assert stacks[high | node.index] == node.stack
text = nodes.render(stacks=True)
for make in expected:
    assert f":{make.__name__}" in text
g.replay()
torch.cuda.synchronize()
""",
        tmp_path,
    )


def test_a_scope_opened_on_a_stream_that_is_not_capturing_yet(tmp_path: Path) -> None:
    run_fresh(
        """
x = torch.zeros(8, device="cuda")
side = torch.cuda.Stream()

def work():
    main = torch.cuda.current_stream()
    event = torch.cuda.Event()
    event.record(main)
    with torch.cuda.stream(side), mark_kernels("side"):
        side.wait_event(event)
        x.add_(1)
    main.wait_stream(side)
    annotation = {"name": "lane"}
    with mark_stream(side, annotation):
        side.wait_stream(main)
        x.mul_(2)
    main.wait_stream(side)
    assert annotation == {"name": "lane"}

for backend in ("cupti", "edge_walk"):
    kernels = [node for node in capture_nodes(capture(work, {"backend": backend})) if node.kind == "kernel"]
    assert kernels[0].annotation == {"name": "side"}
    assert kernels[1].annotation["name"] == "lane" and isinstance(kernels[1].annotation["stream"], int)
""",
        tmp_path,
    )


def test_two_threads_capture_at_once(tmp_path: Path) -> None:
    run_fresh(
        """
together = threading.Barrier(2, timeout=60)
found = {}

def run(name):
    x = torch.zeros(8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    together.wait()
    g = torch.cuda.CUDAGraph(keep_graph=True)
    with graph(g, stream=stream, capture_error_mode="thread_local", enable_annotations=True,
               annotation_config=STACKS):
        together.wait()
        for _ in range(100):
            with mark_kernels(name):
                x.add_(1)
    found[name] = capture_nodes(g)

threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert PROCESS.callbacks is None
for name in ("a", "b"):
    assert [node.annotation for node in found[name]] == [{"name": name}] * 100, found
""",
        tmp_path,
    )


def test_a_failed_capture_gives_cupti_back_twice_in_a_row(tmp_path: Path) -> None:
    run_fresh(
        """
x = torch.zeros(8, device="cuda")

def fails():
    with mark_kernels("a"):
        x.add_(1)
        raise ZeroDivisionError

for _ in range(2):
    try:
        capture(fails, STACKS)
    except ZeroDivisionError:
        pass
    assert PROCESS.callbacks is None and PROCESS.num_recording == 0 and not PROCESS.by_graph
    assert not get_kernel_annotations() and not get_kernel_py_stacks()
g = capture(lambda: x.add_(1), STACKS)
assert len(get_kernel_py_stacks()) == 1
del g
assert not get_kernel_py_stacks()
assert profiled(lambda: x.add_(1)) == 1
""",
        tmp_path,
    )


def test_nothing_is_recorded_once_a_capture_is_over(tmp_path: Path) -> None:
    run_fresh(
        """
x = torch.zeros(8, device="cuda")
g = capture(lambda: x.add_(1), STACKS)
other = torch.cuda.CUDAGraph(keep_graph=True)
with torch.cuda.graph(other), mark_kernels("late"):
    x.mul_(2)
g.instantiate()
assert len(get_kernel_py_stacks()) == 1 and not get_kernel_annotations()
g.reset()
assert not get_kernel_py_stacks()
""",
        tmp_path,
    )


def test_source_keys_need_a_newer_cupti_and_driver_and_auto_never_raises(tmp_path: Path) -> None:
    run_fresh(
        """
from graphcap_backend.annotate.recording import source_ids_available
x = torch.zeros(8, device="cuda")
if source_ids_available():
    g = capture(lambda: x.add_(1), {"key_by": "source", **STACKS})
else:
    try:
        capture(lambda: x.add_(1), {"key_by": "source"})
    except CuptiMissingError as error:
        assert "13.4" in str(error) and "exec" in str(error)
    else:
        raise AssertionError("expected CuptiMissingError")
assert PROCESS.callbacks is None
g = capture(lambda: x.add_(1), {"key_by": "auto", **STACKS})
assert len(get_kernel_py_stacks()) >= 1
""",
        tmp_path,
    )


def test_twelve_layers_of_one_fused_kernel_are_told_apart(tmp_path: Path) -> None:
    calls = "\n".join(f"    x = layer(x, weights[{number}])" for number in range(12))
    program = """
from graphcap_backend import report

def layer(x, w):
    return torch.nn.functional.gelu(x @ w) * 0.5

def model(x, *weights):
CALLS
    return x

first = model.__code__.co_firstlineno + 1
x = torch.randn(32, 64, device="cuda")
weights = [torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(12)]
compiled = torch.compile(model, backend="graphcap", fullgraph=True)
for _ in range(4):
    compiled(x, *weights).sum().backward()

def lines(node):
    frames = [line.rsplit(":", 2) for line in (node.stack or "").splitlines()]
    return [int(line) for file, line, function in frames if function == "model" and file.endswith("program.py")]

forward, backward = report(compiled).graphs[:2]
for g in (forward, backward):
    kernels = [node for node in capture_nodes(g) if node.kind == "kernel"]
    assert len(kernels) >= 24, kernels
    by_name = {}
    for node in kernels:
        assert lines(node), node
        by_name.setdefault(node.name, []).append(lines(node)[0] - first)
    # A fused kernel that is launched once a layer, under one name: each launch has its own layer's line.
    many = [layers for name, layers in by_name.items() if "triton" in name and len(layers) >= 10]
    assert many, by_name
    for layers in many:
        assert len(set(layers)) == len(layers), by_name
    assert {layer for layers in by_name.values() for layer in layers} == set(range(12))
"""
    run_fresh(program.replace("CALLS", calls), tmp_path)
