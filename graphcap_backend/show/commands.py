"""What the commands of ``python -m graphcap_backend`` do, as text; printing is the command line's."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from graphcap_backend.annotate.profile import scope_names
from graphcap_backend.errors import CuptiError, CuptiMissingError, GraphcapError
from graphcap_backend.show.profile import NO_LINE, NO_MODULE, NO_SCOPE, Profile, module_lines, nodes_by, share_lines
from graphcap_backend.show.saved import SavedCapture, SavedGraph, SavedPart, split_frame

_SHOWN = 10
_NONE = "none"
_DRIVER_NEEDED = 13000


def nodes_text(capture: SavedCapture, options: dict[str, Any]) -> Iterator[str]:
    """Each graph's nodes as ``NodeList.render`` shows them, below its name."""
    for graph in capture.graphs:
        yield f"{graph.name}: {len(graph.nodes)} nodes\n"
        yield graph.nodes.render(**options)


def diff_text(before: SavedCapture, after: SavedCapture, options: dict[str, Any]) -> str:
    """What changed, graph by graph in their order; empty where nothing did."""
    found = []
    for one, other in zip_longest(before.graphs, after.graphs):
        if one is None or other is None:
            mark, graph = ("+", other) if one is None else ("-", one)
            assert isinstance(graph, SavedGraph)
            found.append(f"{mark} {graph.name}: a whole graph of {len(graph.nodes)} nodes\n")
        elif change := one.nodes.diff(other.nodes, **options):
            found.append(f"{other.name}: {change}")
    return "".join(found)


def report_text(capture: SavedCapture) -> Iterator[str]:
    """What was captured, what was not and why, and where time (or nodes) went."""
    yield ", ".join(f"{name} {version}" for name, version in capture.versions.items())
    for part in capture.parts:
        yield from _part_lines(part)
    if not capture.parts:
        yield from (f"{graph.name}: {len(graph.nodes)} nodes" for graph in capture.graphs)
    if not capture.graphs:
        yield "no captured graph"
        return
    yield ""
    if capture.profile is not None:
        yield from _time_lines(capture.profile, capture)
        return
    lines = nodes_by(capture, lambda node: node.sources, NO_LINE)
    yield f"{capture.num_nodes} nodes by source line (no times were saved; save what profile_replays() gives):"
    yield from _with_text(share_lines(lines[:_SHOWN], capture.num_nodes), [line.label for line in lines], capture)
    modules = nodes_by(capture, lambda node: node.modules, NO_MODULE)
    yield from module_lines(lines, modules, capture.num_nodes)
    scopes = nodes_by(capture, lambda node: scope_names(node.annotation), NO_SCOPE)
    if [scope.label for scope in scopes] != [NO_SCOPE]:
        yield "by scope:"
        yield from share_lines(scopes[:_SHOWN], capture.num_nodes)


def _time_lines(profile: Profile, capture: SavedCapture) -> Iterator[str]:
    where = "on the GPU" if profile.clock == "cuda" else "of launches on the CPU"
    yield f"{profile.nodes_ns / profile.num_calls / 1000:.1f} us {where} a call, over {profile.num_calls} calls"
    total, lines, scopes = profile.nodes_ns, profile.by_line(), profile.by_scope()
    yield "by source line:"
    yield from _with_text(share_lines(lines[:_SHOWN], total), [line.label for line in lines], capture)
    yield from module_lines(lines, profile.by_module(), total)
    if [scope.label for scope in scopes] != [NO_SCOPE]:
        yield "by scope:"
        yield from share_lines(scopes[:_SHOWN], total)
    yield "by kernel:"
    yield from share_lines(profile.by_kernel()[:_SHOWN], total)
    if profile.outside:
        yield f"{(profile.total_ns - total) / profile.num_calls / 1000:.1f} us a call outside of the graphs"


def _with_text(rows: list[str], labels: list[str], capture: SavedCapture) -> Iterator[str]:
    """Rows, each with the text of its source line below."""
    for row, label in zip(rows, labels, strict=False):
        yield row
        place = split_frame(label)
        text = capture.source_text.get(place[0], {}).get(place[1], "") if place else ""
        if text.strip():
            yield f"{'':40}{text.strip()}"


def _part_lines(part: SavedPart) -> Iterator[str]:
    yield (
        f"{part.name}: {part.state}, {part.num_keys} keys, {len(part.graphs)} graphs, {part.num_nodes} nodes, "
        f"{part.num_bytes} bytes, {part.num_replays} replays" + (f", recorded by {part.way}" if part.way else "")
    )
    if part.where and part.where not in [reason.where for reason in part.reasons]:
        yield f"  at {part.where}"
    if part.fallbacks:
        yield "  uncaptured calls: " + ", ".join(f"{number} {kind}" for kind, number in part.fallbacks.items())
    for reason in part.reasons:
        yield f"  not captured: {reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of what the environment has."""

    name: str
    found: str
    missing: str = ""
    """What does not work without it; empty where all is well."""


def environment() -> Iterator[Finding]:
    """What was found here, and what does not work for want of the rest. Takes CUPTI for a moment."""
    import torch

    yield Finding(name="graphcap", found=importlib.metadata.version("graphcap-backend"))
    yield Finding(name="python", found=platform.python_version())
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding(name="torch", found=f"{torch.__version__}, {built}")
    driver = _driver()
    yield _device(torch, driver)
    yield driver
    yield _package("cuda-bindings", "nodes of CUDA graphs can't be read: pip install cuda-bindings")
    yield _cupti(torch, driver)
    yield _package("cupti-python", "profile_replays() can't time a GPU: pip install 'cupti-python>=13.0.1,<13.1'")
    yield _package("triton", "Inductor can't compile for a GPU")
    yield Finding(name="HostGraph", found="works (captures on the CPU need nothing else)")


def _device(torch: Any, driver: Finding) -> Finding:
    if torch.cuda.is_available():
        return Finding(name="GPU", found=", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))))
    if torch.version.cuda is None:
        why = "torch is built without CUDA"
    elif driver.found == _NONE:
        why = "there is no NVIDIA driver"
    else:
        why = f"the driver ({driver.found}) shows none to torch: too old for it, or CUDA_VISIBLE_DEVICES hides them"
    missing = f"{why}; captures go to a HostGraph: options={{'host_capture': True}}"
    return Finding(name="GPU", found=_NONE, missing=missing)


def _driver() -> Finding:
    from graphcap_backend.annotate import edge_walk

    try:
        version = edge_walk.driver_version()
    except OSError as error:
        return Finding(name="driver", found=_NONE, missing=f"no NVIDIA driver is installed ({error}): no GPU is used")
    except GraphcapError as error:
        return Finding(name="driver", found="not usable", missing=f"no GPU is used: {error}")
    missing = "" if version >= _DRIVER_NEEDED else "capture on a GPU needs a driver for CUDA 13.0 or later"
    return Finding(name="driver", found=f"CUDA {version // 1000}.{version % 1000 // 10}", missing=missing)


def _cupti(torch: Any, driver: Finding) -> Finding:
    from graphcap_backend.annotate import cupti

    if torch.version.cuda is None:
        return Finding(name="libcupti", found="not looked for", missing="torch is built without CUDA")
    if driver.found == _NONE:
        found = "found, not asked" if cupti.is_loadable() else _NONE
        return Finding(name="libcupti", found=found, missing="without an NVIDIA driver CUPTI answers nothing")
    lost = "scopes go by edge walk, stacks are those of compiled kernels only, nothing is profiled"
    found = "found"
    try:
        number = cupti.version()
        found = f"{number // 10000}.{number % 10000 // 100}"
        if torch.cuda.is_available():
            cupti.acquire_callbacks()
            cupti.release_callbacks()
    except CuptiMissingError as error:
        return Finding(name="libcupti", found=_NONE, missing=f"{lost}: {error}")
    except CuptiError as error:
        return Finding(name="libcupti", found=f"{found}, not usable", missing=f"{lost}: {error}")
    return Finding(name="libcupti", found=found)


def _package(name: str, missing: str) -> Finding:
    try:
        return Finding(name=name, found=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name=name, found="not installed", missing=missing)
