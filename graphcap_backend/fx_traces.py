"""Stack traces of FX nodes, and what rides along in them.

Compilers carry a node's stack trace to every kernel that is made from it. So module path and scope of the node are put
in front of its trace as a pseudo frame before a graph is compiled, and split off again from the traces that come out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

SCOPE_FRAME = "<graphcap "
"""File name, up to its JSON, of the pseudo frame that carries module path and scope."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def tag_nodes(gm: torch.fx.GraphModule) -> str:
    """Put module path and scope of each node in front of its stack trace; return a digest of all."""
    digest = hashlib.sha256()
    for node in gm.graph.nodes:
        # Empty where no line of the user's ran: in a torch.nn.Sequential, say.
        trace = node.meta.get("stack_trace") or ""
        if node.op in ("placeholder", "output"):
            continue
        origin: dict[str, Any] = {}
        if module := _module_path(node.meta.get("nn_module_stack")):
            origin["module"] = module
        if scope := (node.meta.get("custom") or {}).get("graphcap"):
            origin["scope"] = scope
        if origin:
            trace = f'  File "{SCOPE_FRAME}{_quoted(origin)}>", line 1, in scope\n    pass\n{trace}'
            node.meta["stack_trace"] = trace
        digest.update(trace.encode())
    return digest.hexdigest()[:16]


def trace_untraced(gm: torch.fx.GraphModule) -> None:
    """Give calls without a stack trace that of what reads them."""
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and not node.meta.get("stack_trace"):
            traces = (user.meta.get("stack_trace") for user in node.users)
            if trace := next(filter(None, traces), None):
                node.meta["stack_trace"] = trace


def split_scope_frame(trace: str) -> tuple[dict[str, Any], str]:
    """What the pseudo frame of a trace carries, nothing where there is none, and the trace without it."""
    start = trace.find(SCOPE_FRAME)
    if start < 0:
        return {}, trace
    end = trace.index(">", start)
    rest = trace[trace.index("\n", end) + 1 :]
    return read_scope_frame(trace[start : end + 1]), rest.removeprefix("    pass\n")


def read_scope_frame(file: str) -> dict[str, Any]:
    """What the pseudo frame with this file name carries: "module", a path, and "scope", an annotation, if known."""
    origin: dict[str, Any] = json.loads(bytes.fromhex(file[len(SCOPE_FRAME) : -1]).decode())
    return origin


def innermost_line(traces: Sequence[str | None]) -> str | None:
    """The user's innermost line, "file:line:function", of the first trace that has one."""
    for trace in traces:
        frames = [frame for frame in _FRAME.findall(trace or "") if not frame[0].startswith(SCOPE_FRAME)]
        if frames:
            return ":".join(frames[-1])
    return None


def _quoted(origin: Mapping[str, Any]) -> str:
    # Hex keeps quotes and newlines of user values out of a line that others parse.
    return json.dumps(origin, sort_keys=True, default=repr).encode().hex()


def _module_path(stack: Mapping[str, tuple[str, Any]] | None) -> str | None:
    """ "blocks.0.mlp" for the innermost module of Dynamo's nn_module_stack, or None at the top."""
    if not stack:
        return None
    path = list(stack.values())[-1][0]
    path = re.sub(r"_modules\['([^']*)'\]|\['([^']*)'\]", r".\1\2", path)
    path = re.sub(r"\[(\d+)\]", r".\1", path)
    parts = [part for part in path.split(".") if part]
    return ".".join(parts[2:]) or None if parts[:1] == ["L"] else ".".join(parts) or None
