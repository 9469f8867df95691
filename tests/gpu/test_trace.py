"""Labels in real traces of torch.profiler: every event of a replay is named, by id or by order."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fresh_process import needs_cuda, run_fresh


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    needs_cuda()


COMMON = """
import gzip, os
from torch.profiler import ProfilerActivity, profile
from graphcap_backend import annotate_trace, report, save_capture

def traced(path, work):
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(path)

def events(path):
    with (gzip.open(path, "rt") if path.endswith(".gz") else open(path)) as file:
        return json.load(file)["traceEvents"]

def gpu(path):
    return [e for e in events(path) if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
"""


def test_a_compiled_model(tmp_path: Path) -> None:
    run_fresh(
        COMMON
        + """
from graphcap_backend.demo import Transformer
model = Transformer(3).cuda().eval()
compiled = torch.compile(model, backend="graphcap")
x = torch.randn(2, 16, 64, device="cuda")
with torch.no_grad():
    for _ in range(4):
        compiled(x)
    traced("src.json.gz", lambda: [compiled(x) for _ in range(5)])
save_capture("capture.json.gz", compiled)
done = annotate_trace("src.json.gz", "dst.json.gz", capture="capture.json.gz")
print(done)
num_work = sum(node.kind in WORK for node in capture_nodes(report(compiled).graphs[0]))
assert done.num_replays == 5, done
assert done.num_labelled == 5 * num_work, (done, num_work)
assert not done.unlabelled, done
labelled = [event for event in gpu("dst.json.gz") if "node" in event["args"]]
assert len(labelled) == done.num_labelled
assert all(any("demo.py" in line for line in event["args"]["source"]) for event in labelled)
before, after = events("src.json.gz"), events("dst.json.gz")
for old, new in zip(before, after):  # what the trace says of its own stays; lines that are added come behind
    added = {"args", "tid"} if "node" in new.get("args", {}) else set()
    rest = [{k: v for k, v in event.items() if k not in added} for event in (old, new)]
    assert rest[0] == rest[1], (old, new)
again = annotate_trace("src.json.gz", "again.json.gz", capture=compiled)
assert again.num_labelled == done.num_labelled
""",
        tmp_path,
    )


def test_a_manual_graph_with_streams_and_scopes(tmp_path: Path) -> None:
    run_fresh(
        COMMON
        + """
x = torch.randn(256, 256, device="cuda")
side = torch.cuda.Stream()
def work():
    main = torch.cuda.current_stream()
    with mark_kernels("main"):
        a = x @ x
    side.wait_stream(main)
    with mark_stream(side, "side"):
        b = torch.relu(x)
    with mark_kernels("tail"):
        c = a.cumsum(0)
    main.wait_stream(side)
    return a, b, c
work()
torch.cuda.synchronize()
g = capture(work, STACKS)
g.replay()
traced("src.json", lambda: [g.replay(), work(), g.replay()])
done = annotate_trace("src.json", "dst.json")
print(done)
num_work = sum(node.kind in WORK for node in capture_nodes(g))
assert done.num_labelled == 2 * num_work and not done.unlabelled, (done, num_work)
scopes = {e["args"].get("scope") for e in gpu("dst.json") if "node" in e["args"]}
assert scopes == {"main", "side", "tail"}, scopes
(lane,) = {e["tid"] for e in gpu("dst.json") if e["args"].get("scope") == "side"}
assert lane >= 60
assert all("original_stream" in e["args"] for e in gpu("dst.json") if e["tid"] == lane)
names = {e["tid"]: e["args"]["name"] for e in events("dst.json") if e.get("name") == "thread_name"}
assert names[lane].endswith("(side)")
eager = [e for e in gpu("dst.json") if "node" not in e["args"]]
assert eager == [e for e in gpu("src.json") if e["args"]["correlation"] in {e["args"]["correlation"] for e in eager}]
assert [e["name"] for e in events("dst.json") if e.get("cat") == "graphcap_scope"]
""",
        tmp_path,
    )


def test_a_graph_that_was_not_captured_here_is_left_alone(tmp_path: Path) -> None:
    run_fresh(
        COMMON
        + """
x = torch.randn(256, 256, device="cuda")
foreign = torch.cuda.CUDAGraph()
torch.relu(x) + 1
torch.cuda.synchronize()
with torch.cuda.graph(foreign):
    y = torch.relu(x) + 1
g = capture(lambda: x.cumsum(0), STACKS)
traced("src.json", lambda: [foreign.replay(), g.replay()])
done = annotate_trace("src.json", "dst.json")
num_work = sum(node.kind in WORK for node in capture_nodes(g))
assert done.num_labelled == num_work and sum(done.unlabelled.values()) == 2, done
""",
        tmp_path,
    )
