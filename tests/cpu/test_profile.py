"""GPU time by line: sums are exact, nothing is counted twice. Host captures stand in for the GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.saved_captures import model_nodes, profiled
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from graphcap_backend import GraphcapError, HostGraph, NodeList, graph, mark_kernels, profile_replays, report
from graphcap_backend.annotate.profile import Activity, Weighed, join, scope_names, share_out, tally
from graphcap_backend.show.profile import NO_LINE, NO_SCOPE

_activities = st.lists(st.builds(Activity, st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 10**9)))


@given(_activities)
def test_every_activity_counts_once(activities: list[Activity]) -> None:
    nodes, others = join(activities, {1: "one", 2: "two", 3: "one again"})
    timings = [*nodes.values(), *others.values()]
    assert sum(timing.total_ns for timing in timings) == sum(each.duration_ns for each in activities)
    assert sum(timing.count for timing in timings) == len(activities)
    assert all(timing.min_ns <= timing.mean_ns <= timing.max_ns for timing in timings)
    assert set(nodes) == {{1: "one", 2: "two", 3: "one again"}[a.node_id] for a in activities if 1 <= a.node_id <= 3}


def test_tally() -> None:
    (timing,) = tally([("k", 5), ("k", 2), ("k", 8)]).values()
    assert (timing.count, timing.total_ns, timing.min_ns, timing.max_ns, timing.mean_ns) == (3, 15, 2, 8, 5.0)


_weighed = st.builds(Weighed, st.lists(st.sampled_from("abcd")), st.integers(0, 10**12), st.integers(0, 9))


@given(st.lists(_weighed))
def test_shares_sum_up_exactly(nodes: list[Weighed]) -> None:
    shares = share_out(nodes, "none")
    assert sum(share.weight for share in shares) == sum(node.weight for node in nodes)
    assert all(0 <= share.shared <= share.weight for share in shares)
    assert [share.weight for share in shares] == sorted((share.weight for share in shares), reverse=True)
    alone = sum(node.weight for node in nodes if len(set(node.labels)) <= 1)
    assert sum(share.weight - share.shared for share in shares) == alone


def test_a_fused_kernel_is_shared_evenly() -> None:
    profile = profiled(model_nodes(), [300, 101, 7], outside=50)
    rows = {share.label: (share.weight, share.shared, share.num_nodes) for share in profile.by_line()}
    assert rows == {
        "/m/model.py:10:forward": (350, 50, 2),
        "/m/model.py:11:forward": (51, 51, 1),
        NO_LINE: (7, 0, 1),
    }
    assert [(share.label, share.weight) for share in profile.by_scope()] == [
        ("mlp", 351),
        ("residual", 50),
        (NO_SCOPE, 7),
    ]
    assert [(share.label, share.weight) for share in profile.by_module()][:2] == [("up", 351), ("down", 50)]
    assert {share.label for share in profile.by_kernel()} == {"gemm", "triton_poi_fused_add_gelu", "copy_kernel"}
    assert (profile.nodes_ns, profile.total_ns) == (408, 458)
    assert "model.py:10:forward" in str(profile).splitlines()[1]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (None, ()),
        ({"name": "a"}, ("a",)),
        ({"name": "a", "autograd_phase": "backward"}, ("a (backward)",)),
        ({"layer": 3, "stream": 60}, ("layer=3",)),
        ({"stream": 60}, ()),
        ({"name": "a", "fused": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}, ("a", "b")),
    ],
)
def test_names_of_scopes(annotation: dict[str, object] | None, expected: tuple[str, ...]) -> None:
    assert scope_names(annotation) == expected


def _host_graph() -> HostGraph:
    x = torch.randn(64, 64)
    g = HostGraph()
    with graph(g, enable_annotations=True, annotation_config={"record_py_stacks": True}):
        with mark_kernels("matmul"):
            y = x @ x
        (y + 1).mul_(2)
    return g


def test_a_host_graph_by_launch() -> None:
    g = _host_graph()
    profile = profile_replays(g, num_replays=7)
    assert profile.clock == "cpu"
    assert [time.path for time in profile.times] == [(0,), (1,), (2,)]
    assert {time.timing.count for time in profile.times} == {7}
    assert all(time.timing.min_ns > 0 for time in profile.times)
    assert not profile.outside
    assert sum(share.weight for share in profile.by_line()) == profile.nodes_ns == profile.total_ns
    assert {share.label for share in profile.by_scope()} == {"matmul", NO_SCOPE}
    assert g.launch_timer is None


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.up(x))
        out: Tensor = self.down(h)
        return out


def test_a_compiled_function_by_line() -> None:
    compiled = torch.compile(_Net().eval(), backend="graphcap", options={"host_capture": True})
    with torch.no_grad():
        profile = profile_replays(compiled, torch.randn(8, 32), num_replays=4)
    assert {time.timing.count for time in profile.times} == {4}
    assert sum(share.weight for share in profile.by_line()) == profile.nodes_ns
    lines = [share.label for share in profile.by_line()]
    assert any("test_profile.py" in line and line.endswith(":forward") for line in lines)
    assert {share.label for share in profile.by_module()} >= {"up", "down"}


def test_modules_are_shown_where_most_has_no_line() -> None:
    nodes = [replace(node, sources=()) for node in model_nodes()]
    rows = str(profiled(NodeList(nodes), [300, 101, 7])).splitlines()
    assert rows[1].split() == ["100.0%", "3", "nodes", *NO_LINE.split()]
    assert rows[2].startswith("by module (most has no source line")
    assert [(row.split()[0], row.split()[-1]) for row in rows[3:5]] == [("86.0%", "up"), ("12.3%", "down")]
    assert "by module" not in str(profiled(model_nodes(), [300, 101, 401]))  # half of it
    assert "by module" in str(profiled(model_nodes(), [300, 101, 402]))
    unknown = NodeList([replace(node, sources=(), modules=()) for node in nodes])
    assert "by module" not in str(profiled(unknown, [300, 101, 7]))


def test_a_model_of_torch_s_own_modules_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    compiled = torch.compile(model, backend="graphcap", options={"host_capture": True})
    with torch.no_grad():
        profile = profile_replays(compiled, torch.randn(8, 32), num_replays=2)
    assert [share.label for share in profile.by_line()] == [NO_LINE]
    rows = str(profile).partition("by module")[2].splitlines()[1:]
    assert {row.split()[-1] for row in rows} == {"0", "1", "2"}


def test_a_training_step() -> None:
    net = _Net()
    compiled = torch.compile(net, backend="graphcap", options={"host_capture": True})
    x = torch.randn(8, 32)

    def step() -> None:
        net.zero_grad()
        compiled(x).sum().backward()

    profile = profile_replays(compiled, run=step, num_replays=3)
    kinds = {part.kind for part in profile.capture.parts if part.graphs}
    assert kinds == {"forward", "backward"}
    measured = {time.graph for time in profile.times}
    assert all(set(part.graphs) & measured for part in profile.capture.parts)


def test_what_cannot_be_measured() -> None:
    g = _host_graph()
    with pytest.raises(ValueError, match="num_replays must be an int of at least 1, found 0"):
        profile_replays(g, num_replays=0)
    with pytest.raises(TypeError, match="a graph replays without arguments"):
        profile_replays(g, torch.ones(1))
    with pytest.raises(TypeError, match="either run or arguments"):
        profile_replays(g, 1, run=print)
    with pytest.raises(GraphcapError, match="needs a graph captured"):
        profile_replays(HostGraph())
    called = []
    with pytest.raises(
        ValueError, match=r"^profile_replays\(.*\) takes what torch\.compile\(.*, found builtin_function_or_method"
    ):
        profile_replays(called.append, torch.ones(1))
    assert not called
    compiled = torch.compile(lambda x: x + 1, backend="graphcap")
    with pytest.raises(ValueError, match=r"a Report cannot be called: .* the compiled function"):
        profile_replays(report(compiled))


def test_calls_that_replay_nothing_are_no_profile() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="graphcap", options={"host_capture": True})
    with torch.no_grad():
        for _ in range(2):
            compiled(torch.ones(3))
        with pytest.raises(GraphcapError, match="20 calls replayed none of the 1 captured graphs"):
            profile_replays(compiled, run=lambda: None)


def test_nothing_captured_says_why() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="graphcap", options={"on_skip": "ignore"})
    with pytest.raises(GraphcapError, match=r"found none after 3 calls(.|\n)*runs on the CPU"):
        profile_replays(compiled, torch.ones(3))
    assert not report(compiled).graphs


def test_a_failing_call_stops_the_timing() -> None:
    g = _host_graph()
    calls = iter(range(5))

    def run() -> None:
        g.replay()
        if next(calls) == 4:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        profile_replays(g, run=run)
    assert g.launch_timer is None
