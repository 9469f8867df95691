"""Serve a transformer of twelve layers and write what one looks at afterwards: page, flame graph, annotated trace.

    python docs/gpu_pictures.py DIR

Prints microseconds a call from four sources: the raw activity records, the page, the flame graph, the trace. The
first three are of the same calls and have to agree within 1%, line by line too. Without a GPU the page and the flame
graph come from a ``HostGraph``, and there is no trace.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graphcap_backend import Profile, annotate_trace, mark_kernels, profile_replays, report, write_flame_graph

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers import layered_transformer

NUM_PROFILED = 20
NUM_TRACED = 3
_GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


@torch.no_grad()
def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)  # threads that wait for cores are what would be timed
    layered_transformer.mark = _mark_layers
    model = layered_transformer.Transformer().to(device).eval()
    compiled = torch.compile(model, backend="graphcap", options={"host_capture": device == "cpu"})
    x = layered_transformer.batch(device, 0)

    records = _kept_records() if device == "cuda" else []
    profile = profile_replays(compiled, x, num_replays=NUM_PROFILED)
    print(profile)
    report(compiled).to_html(folder / "page.html", profile)
    write_flame_graph(folder / "flame.speedscope.json", profile)

    expected = _records_by_line(records[-1], profile) if records else _profile_by_line(profile)
    _compare("activity records", expected, expected)
    _compare("page", page_by_line(folder / "page.html"), expected)
    _compare("flame graph", flame_by_line(folder / "flame.speedscope.json"), expected)
    if device == "cuda":
        _trace(folder, compiled, lambda: compiled(x))


def _mark_layers(annotation: str | dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """A name for each layer; none for its parts, whose names would take its place."""
    return contextlib.nullcontext() if isinstance(annotation, str) else mark_kernels(f"layer {annotation['layer']}")


def _compare(name: str, found: dict[str, float], expected: dict[str, float]) -> None:
    """Nanoseconds by line, over all calls that were profiled."""
    total = sum(expected.values())
    print(f"{name}: {sum(found.values()) / NUM_PROFILED / 1000:.2f} us a call, {len(found)} lines")
    assert abs(sum(found.values()) - total) <= 0.01 * total, (name, sum(found.values()), total)
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for line, nanoseconds in expected.items():
        assert abs(found[line] - nanoseconds) <= 0.01 * nanoseconds + len(found), (name, line, found[line], nanoseconds)


def _kept_records() -> list[list[Any]]:
    """Where the raw records of each measurement will be."""
    from graphcap_backend.annotate import activities

    kept: list[list[Any]] = []

    class Kept(activities.ActivityRecords):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self.found)

    activities.ActivityRecords = Kept  # type: ignore[misc]
    return kept


def _records_by_line(records: list[Any], profile: Profile) -> dict[str, float]:
    graphs = {graph.exec_graph_id: graph.nodes for graph in profile.capture.graphs}
    found: dict[str, float] = defaultdict(float)
    for record in records:
        if record.node_id:
            sources = graphs[record.node_id >> 32][record.node_id & 0xFFFF_FFFF].sources
            for source in sources:
                found[_short(source)] += record.duration_ns / len(sources)
    return found


def _profile_by_line(profile: Profile) -> dict[str, float]:
    return {_short(share.label): float(share.weight) for share in profile.by_line()}


def page_by_line(path: Path) -> dict[str, float]:
    """Nanoseconds by line, from the data in the page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert match is not None
    data = json.loads(match[1])
    found: dict[str, float] = defaultdict(float)
    for node in data["nodes"]:
        for source in node.get("sources", ()) if "timing" in node else ():
            frame = data["frames"][source]
            place = f"{data['files'][frame['file']]['path']}:{frame['line']}"
            found[_short(f"{place}:{frame['function']}")] += node["timing"][1] / len(node["sources"])
    return found


def flame_by_line(path: Path) -> dict[str, float]:
    """Nanoseconds by line: the frame above the kernel's."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    names = [frame["name"] for frame in whole["shared"]["frames"]]
    (profile,) = whole["profiles"]
    found: dict[str, float] = defaultdict(float)
    for sample, weight in zip(profile["samples"], profile["weights"], strict=True):
        found[names[sample[-2]]] += weight
    return found


def _short(source: str) -> str:
    """ "forward (model.py:3)", as flame graphs show it."""
    path, line, function = source.rsplit(":", 2)
    return f"{function} ({Path(path).name}:{line})"


def _trace(folder: Path, compiled: Any, call: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_TRACED):
            call()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(folder / "plain.json.gz"))
    done = annotate_trace(folder / "plain.json.gz", folder / "trace.json.gz", capture=compiled)
    (folder / "plain.json.gz").unlink()
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("cat") in _GPU_EVENTS]
    labelled = [event for event in events if event["args"].get("source")]
    print(f"trace: {sum(event['dur'] for event in labelled) / NUM_TRACED:.2f} us a call; {done}")
    assert done.num_replays == NUM_TRACED, done
    assert not done.unlabelled, done
    assert len(labelled) == done.num_labelled, done


if __name__ == "__main__":
    main(Path(sys.argv[1]))
