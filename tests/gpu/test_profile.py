"""GPU time by line, from activity records: each test in a process of its own, CUPTI being one a process."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fresh_process import needs_cuda, run_fresh


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    needs_cuda()
    pytest.importorskip("cupti.cupti", reason="needs cupti-python")


MODEL = """
from graphcap_backend import profile_replays, report
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)
    def forward(self, x):
        h = nn.functional.gelu(self.up(x))
        return torch.softmax(self.down(h) + x, -1)

torch.manual_seed(0)
net = Net().cuda().eval()
x = torch.randn(64, 256, device="cuda")
"""


def test_a_compiled_function(tmp_path: Path) -> None:
    run_fresh(
        MODEL
        + """
compiled = torch.compile(net, backend="graphcap")
with torch.no_grad():
    profile = profile_replays(compiled, x, num_replays=20)
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-3, atol=1e-3)
assert profile.clock == "cuda"
# Two instances may take turns: a node of either counts its own replays.
work = {}
for time in profile.times:
    work[time.path] = work.get(time.path, 0) + time.timing.count
nodes = profile.capture.graphs[0].nodes
assert work == {(node.index,): 20 for node in nodes if node.kind in WORK}, (work, nodes.render())
assert all(0 < t.timing.min_ns <= t.timing.mean_ns <= t.timing.max_ns for t in profile.times)
assert sum(share.weight for share in profile.by_line()) == profile.nodes_ns
assert profile.total_ns == profile.nodes_ns + sum(o.timing.total_ns for o in profile.outside)
lines = [share.label for share in profile.by_line()]
assert all("program.py" in line for line in lines), lines
assert {line.rpartition(":")[2] for line in lines} == {"forward"}, lines
# The activity records are the GPU's own times: back to back replays take at least as long.
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
with torch.no_grad():
    start.record()
    for _ in range(20):
        compiled(x)
    end.record()
torch.cuda.synchronize()
assert profile.total_ns / 20 < 1.5e6 * start.elapsed_time(end) / 20
print(profile)
""",
        tmp_path,
    )


def test_a_manual_graph_with_copies_fills_and_scopes(tmp_path: Path) -> None:
    run_fresh(
        MODEL
        + """
pinned = torch.empty(64, 256, pin_memory=True)
y = torch.empty_like(x)
def work():
    with mark_kernels("mlp"):
        y.copy_(x @ x.t() @ x)
    z = torch.empty(4096, device="cuda").zero_()
    pinned.copy_(y, non_blocking=True)
work()
g = capture(work, STACKS)
profile = profile_replays(g, num_replays=9)
kinds = {str(time.node.kind) for time in profile.times}
assert kinds >= {"kernel", "memcpy"}, kinds
assert {time.timing.count for time in profile.times} == {9}, profile.times
assert not profile.outside, profile.outside
assert {share.label for share in profile.by_scope()} == {"mlp", "(no scope)"}
g.instantiate()  # a new executable graph has new ids
assert {time.timing.count for time in profile_replays(g, num_replays=4).times} == {4}
""",
        tmp_path,
    )


def test_replays_and_profiler_survive(tmp_path: Path) -> None:
    """No finalize after activity records: replaying, capturing and profiling go on (see facts of CUPTI)."""
    run_fresh(
        MODEL
        + """
def work():
    global out
    out = (x @ x.t()).relu()
work()  # cuBLAS makes its handle outside the capture
g = capture(work, STACKS)
for _ in range(3):
    assert {time.timing.count for time in profile_replays(g, num_replays=5).times} == {5}
    g.replay()
    h = capture(work, STACKS)  # subscribes and gives back, which must not finalize now
    h.replay()
    torch.cuda.synchronize()
assert profiled(g.replay) >= 2
g.replay(); h.replay(); torch.cuda.synchronize()
torch.testing.assert_close(out, (x @ x.t()).relu())
""",
        tmp_path,
    )


def test_busy_cupti_is_an_error_and_does_no_harm(tmp_path: Path) -> None:
    run_fresh(
        MODEL
        + """
def work():
    global out
    out = (x @ x.t()).relu()
work()  # cuBLAS makes its handle outside the capture
g = capture(work, STACKS)
seen = profiled(g.replay)
assert seen >= 2
try:
    profile_replays(g)
except CuptiBusyError as error:
    assert "torch.profiler" in str(error) and "annotate_trace" in str(error), error
else:
    raise AssertionError("CUPTI was taken from the profiler")
g.replay()
torch.cuda.synchronize()
assert profiled(g.replay) == seen
""",
        tmp_path,
    )


def test_a_training_step(tmp_path: Path) -> None:
    run_fresh(
        MODEL
        + """
net.train()
compiled = torch.compile(net, backend="graphcap")
def step():
    net.zero_grad()
    compiled(x).sum().backward()
profile = profile_replays(compiled, run=step, num_replays=10)
assert {part.kind for part in profile.capture.parts if part.graphs} == {"forward", "backward"}
assert profile.outside  # gradients are put in place by eager kernels
assert sum(share.weight for share in profile.by_line()) == profile.nodes_ns > 0
""",
        tmp_path,
    )
