"""Put the model's lines into a trace that torch.profiler exported.

The concept: in a trace of a replay all kernels hang on one launch, and none says where it comes from.
``annotate_trace`` copies the trace and gives each such event its scope, source lines, stack and node index, for
Perfetto and chrome://tracing. What it is not sure of stays as it was, and is counted.

Without a GPU there is no trace of one: this script then writes what torch.profiler would, for the same nodes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from graphcap_backend import NodeList, annotate_trace, capture_nodes, report


def model(x: Tensor) -> Tensor:
    projected = x @ x.T
    return torch.relu(projected).sum(dim=0)


def traced_on_gpu(call: Callable[[], object], path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def written_by_hand(nodes: NodeList, path: Path) -> None:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    events: list[dict[str, Any]] = [{**launch, "args": {"correlation": 1}}]
    for node in nodes:
        kernel = {
            "ph": "X",
            "cat": "kernel",
            "name": node.name,
            "pid": 0,
            "tid": 7,
            "ts": 10 + 3 * node.index,
            "dur": 2,
        }
        events.append({**kernel, "args": {"stream": 7, "correlation": 1}})
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}, indent=1), encoding="utf-8")


@torch.no_grad()
def main() -> None:
    on_cuda = torch.cuda.is_available()
    compiled = torch.compile(model, backend="graphcap", options={"host_capture": not on_cuda})
    x = torch.randn(16, 16, device="cuda" if on_cuda else "cpu")
    for _ in range(3):
        compiled(x)

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "trace.json"), Path(folder, "annotated.json")
        if on_cuda:
            traced_on_gpu(lambda: compiled(x), source)
        else:
            written_by_hand(capture_nodes(report(compiled).graphs[0]), source)
        result = annotate_trace(source, target, capture=compiled)
        print(result)
        events = json.loads(target.read_text(encoding="utf-8"))["traceEvents"]

    labelled = [event for event in events if "source" in event.get("args", {})]
    for event in labelled:
        print(event["name"], event["args"]["source"], sep="\n    ")
    assert result.num_labelled == len(labelled) > 0
    assert all("07_trace_annotation.py" in str(event["args"]["source"]) for event in labelled)


if __name__ == "__main__":
    main()
