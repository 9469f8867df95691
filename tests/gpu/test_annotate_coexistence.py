"""CUPTI is one a process: captures, torch.profiler, and who comes first."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fresh_process import needs_cuda, run_fresh


@pytest.fixture(autouse=True)
def _cuda() -> None:
    needs_cuda()


WORK = """
x = torch.zeros(64, device="cuda")

def work():
    with mark_kernels("a"):
        x.add_(1)
    x.mul_(1)

def replays(*graphs):
    x.zero_()
    torch.cuda.synchronize()
    kernels = profiled(lambda: [g.replay() for g in graphs])
    assert kernels == 2 * len(graphs), kernels
    assert x.tolist() == [len(graphs)] * 64

def annotations(g):
    return [node.annotation for node in capture_nodes(g)]

work()
"""


def test_capture_profile_capture_profile(tmp_path: Path) -> None:
    run_fresh(
        WORK
        + """
first = capture(work, STACKS)
replays(first)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    second = capture(work)
    third = capture(work)
assert [str(w.message) for w in caught if "CUPTI" in str(w.message)].__len__() == 1, caught
replays(first, second, third)
assert annotations(first) == annotations(second) == annotations(third) == [{"name": "a"}, None]
""",
        tmp_path,
    )


def test_profile_capture_replay_profile(tmp_path: Path) -> None:
    run_fresh(
        WORK
        + """
assert profiled(work) == 2
warnings.simplefilter("ignore")
g = capture(work)
g.replay()
torch.cuda.synchronize()
replays(g)
replays(g, g)
assert annotations(g) == [{"name": "a"}, None]
""",
        tmp_path,
    )


def test_capture_inside_a_running_profile(tmp_path: Path) -> None:
    run_fresh(
        WORK
        + """
warnings.simplefilter("ignore")
before = capture(work)
kept = []

def inside():
    kept.append(capture(work))
    before.replay()
    kept[0].replay()

x.zero_()
torch.cuda.synchronize()  # or the profile may see it
# Torch itself fills the generator's seed and offset where a capture begins.
found = profiled(inside, without="FillFunctor<long>")
assert found == 4, found
assert x.tolist() == [2] * 64
replays(before, kept[0])
assert annotations(kept[0]) == [{"name": "a"}, None]
""",
        tmp_path,
    )


def test_whoever_insists_on_cupti_is_told_who_may_hold_it(tmp_path: Path) -> None:
    run_fresh(
        WORK
        + """
assert profiled(work) == 2
for config in ({"backend": "cupti"}, STACKS, {"backend": "auto", **STACKS}):
    try:
        capture(work, config)
    except CuptiBusyError as error:
        assert "torch.profiler" in str(error) and "cuptiSubscribe" in str(error), error
    else:
        raise AssertionError("expected CuptiBusyError")
    assert PROCESS.callbacks is None and PROCESS.num_recording == 0
    assert not torch.cuda.is_current_stream_capturing()
replays(capture(work, {"backend": "edge_walk"}))
""",
        tmp_path,
    )


def test_compiled_kernels_keep_their_stacks_when_cupti_is_busy(tmp_path: Path) -> None:
    run_fresh(
        WORK
        + """
from graphcap_backend import report
assert profiled(work) == 2
warnings.simplefilter("ignore")

def layer(x, w):
    return torch.relu(x @ w)

def model(x, w1, w2):
    with mark_kernels("first"):
        x = layer(x, w1)
    with mark_kernels("second"):
        return torch.softmax(layer(x, w2), -1)

def user_loop(compiled, *args):
    return compiled(*args)

args = [torch.randn(64, 64, device="cuda") for _ in range(3)]
compiled = torch.compile(model, backend="graphcap", fullgraph=True)
with torch.no_grad():
    for _ in range(3):
        result = user_loop(compiled, *args)
    torch.testing.assert_close(result, model(*args), rtol=1e-3, atol=1e-3)
g = report(compiled).graphs[0]
nodes = [node for node in capture_nodes(g) if node.kind == "kernel"]
for node in nodes:
    assert functions(node)[0] in ("layer", "model"), node
    assert "user_loop" in functions(node), node
    assert node.annotation["name"] in ("first", "second"), node
""",
        tmp_path,
    )
