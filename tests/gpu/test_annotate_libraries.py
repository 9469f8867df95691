"""Captures on a machine that lacks libcupti or cuda-bindings, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fresh_process import needs_cuda, run_fresh


@pytest.fixture(autouse=True)
def _cuda() -> None:
    needs_cuda()


WORK = """
from graphcap_backend import GraphcapError
x = torch.zeros(8, device="cuda")

def work():
    with mark_kernels("a"):
        x.add_(1)
    x.mul_(2)

def check(g):
    x.zero_()
    for expected in (2.0, 6.0):
        g.replay()
        assert x.tolist() == [expected] * 8
    assert [value[0]["name"] for value in get_kernel_annotations().values()] == ["a"]

work()
"""


def test_without_libcupti(tmp_path: Path) -> None:
    run_fresh(
        """
from graphcap_backend.annotate import cupti
cupti._candidates = lambda major: iter(())
"""
        + WORK
        + """
for config in ({"backend": "cupti"}, STACKS):
    try:
        capture(work, config)
    except CuptiMissingError as error:
        assert "needed libcupti.so" in str(error) and "pip install" in str(error), error
    else:
        raise AssertionError("expected CuptiMissingError")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    graphs = []
    for _ in range(2):
        graphs[:] = [capture(work)]
    check(graphs[0])
assert len([w for w in caught if "CUPTI" in str(w.message)]) == 1, caught
assert [node.annotation for node in capture_nodes(graphs[0])] == [{"name": "a"}, None]
assert {key & 0xFFFFFFFF for key in get_kernel_annotations()} == {0}

compiled = torch.compile(lambda t: torch.relu(t * 3), backend="graphcap")
with torch.no_grad():
    for _ in range(4):
        assert compiled(x).tolist() == (x * 3).relu().tolist()
""",
        tmp_path,
    )


@pytest.mark.parametrize("keep", [False, True])
def test_without_cuda_bindings(tmp_path: Path, keep: bool) -> None:
    run_fresh(
        """
import sys
sys.modules["cuda.bindings"] = sys.modules["cuda.bindings.driver"] = None
"""
        + WORK
        + f"""
g = torch.cuda.CUDAGraph(keep_graph={keep})
torch.cuda.synchronize()
with graph(g, enable_annotations=True, annotation_config=STACKS):
    work()
check(g)
assert len(get_kernel_py_stacks()) == 2
for _ in range(2):
    try:
        capture_nodes(g)
    except GraphcapError as error:
        assert "pip install" in str(error) and "cuda" in str(error), error
    else:
        raise AssertionError("expected GraphcapError")
""",
        tmp_path,
    )
