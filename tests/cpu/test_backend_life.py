"""Threads, memory and caches on HostGraph: the scenarios of helpers/backend_life.py; second processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import backend_life
from helpers.backend_calls import Scenario, fresh_compiler, scenario_name, scenarios


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


@pytest.mark.parametrize("scenario", scenarios(backend_life), ids=scenario_name)
def test_life(scenario: Scenario) -> None:
    scenario("cpu")


MODEL = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, x):
        y = self.linear(x)
        y = torch.tanh(y * 2)
        return y.sin()
"""

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch._dynamo.utils import counters
from model import Model
from graphcap_backend import capture_nodes, report
from graphcap_backend.backend import graphcap

torch.manual_seed(0)
model = Model()
fast = torch.compile(model, backend=graphcap, options={"host_capture": True})
for _ in range(4):
    x = torch.randn(2, 3)
    model.zero_grad()
    fast(x).sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(got, [p.grad for p in model.parameters()])
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
found = report(fast)
print(json.dumps({
    "hits": counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"],
    "parts": [(p.kind, p.state, p.num_replays, p.where) for p in found.parts],
    "lines": sorted({s.rsplit("/", 1)[-1] for g in found.graphs for n in capture_nodes(g) for s in n.sources}),
}))
"""


def _run(folder: Path, aot_cache: bool) -> Any:
    # In the caches of this process, which have compiled headers: the folder's name keeps the test's entries apart.
    environment = {
        **os.environ,
        "TORCHINDUCTOR_AUTOGRAD_CACHE": str(int(aot_cache)),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("aot_cache", [True, False], ids=["aot_autograd_cache", "fx_graph_cache"])
def test_cache_hits_in_a_second_process(tmp_path: Path, aot_cache: bool) -> None:
    model = tmp_path / "model.py"
    model.write_text(MODEL)
    first, second = _run(tmp_path, aot_cache), _run(tmp_path, aot_cache)
    assert first["hits"] == 0
    assert second["hits"] > 0
    assert second["parts"] == first["parts"]
    assert {(kind, state) for kind, state, *_ in second["parts"]} == {
        ("forward", "captured"),
        ("backward", "captured"),
        ("inference", "captured"),
    }
    assert second["lines"] == first["lines"]
    assert {"model.py:12:forward", "model.py:13:forward"} <= set(first["lines"])
    if not aot_cache:
        return
    # The same code three lines further down: no line of the old file comes out of the cache.
    model.write_text("\n\n\n" + MODEL)
    shifted = _run(tmp_path, aot_cache)
    assert {"model.py:15:forward", "model.py:16:forward"} <= set(shifted["lines"])
    assert not {"model.py:12:forward", "model.py:13:forward"} & set(shifted["lines"])
