"""Node lists as text for snapshots.

One line a node, details indented below it, bodies of child graphs indented further::

    0 kernel triton_poi_fused_gelu [grid 8x1x1, block 128x1x1, shared 0 B]
        scope mlp
        source model.py:12:forward
    1 memcpy device to host, 1024 B
    2 kernel add_kernel [grid 1x1x1, block 32x1x1, shared 0 B] after 0

A node that waits for exactly the one listed before it says nothing about that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any

from graphcap_backend.capture.bodies import shown_body
from graphcap_backend.capture.kernel_names import display_name
from graphcap_backend.capture.nodes import Dim3, Node, NodeKind, NodeList

INDENT = "    "

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{5,}\b")
_OBJECT_AT = re.compile(r" at 0x[0-9a-fA-F]+")
# Files whose very name is a counter or a hash: Inductor's cache, notebook cells, FX modules.
_COUNTED_FILES = (
    (re.compile(r"c[a-z2-7]{50,}\.(py|cpp)"), r"<generated>.\1"),
    (re.compile(r"<ipython-input[^>]*>"), "<ipython-input>"),
    (re.compile(r"<(eval_with_key|dynamo_generated)>\.\d+.*"), r"<\1>"),
)
_NOTEBOOK_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$")
_COUNTED_FUNCTION = re.compile(r"(__compiled_fn|torch_dynamo_resume_in_\w+?)_\d+(_[0-9a-f_]{8,})?$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Detail:
    """What ``render``, ``diff`` and ``to_dot`` look at."""

    shapes: bool = True
    """Grid, block, cluster and dynamic shared memory of kernels."""
    params: bool = True
    """Direction, bytes and value of copies, fills, allocations and memory ops."""
    dependencies: bool = True
    annotations: bool = True
    sources: bool = True
    """The model's lines in each kernel."""
    stacks: bool = False
    """The launching call path, innermost first."""
    modules: bool = False
    line_numbers: bool = True
    """Line numbers of sources and stacks; off, a snapshot survives edits elsewhere in a file."""
    template_arguments: bool = True
    """Functors and scalar types of C++ kernels, in angle brackets."""
    relative_to: str | None = None
    """Show files below this directory relative to it; others, and all by default, by base name."""

    @classmethod
    def of(cls, detail: Detail | None, options: Mapping[str, Any]) -> Detail:
        """``detail`` (or the default one) with ``options`` set in it.

        Raises:
            TypeError: a name in ``options`` is not a field of Detail.
        """
        valid = [field.name for field in fields(cls)]
        if unknown := sorted(set(options) - set(valid)):
            raise TypeError(f"unknown option {unknown[0]!r}; the options are {', '.join(valid)}")
        return replace(detail or cls(), **options)


def render(nodes: NodeList, detail: Detail) -> str:
    """``nodes`` as text that ends in a newline; an empty list is "(no nodes)"."""
    if not len(nodes):
        return "(no nodes)\n"
    return "\n".join(NodeText(detail).lines(nodes)) + "\n"


class NodeText:
    """The pieces of text about single nodes; one object for one list, or for two to compare.

    It numbers stream lanes in the order it meets them, and shortens each name once.
    """

    def __init__(self, detail: Detail) -> None:
        self.detail = detail
        self._names: dict[str, str] = {}
        self._frames: dict[str, str] = {}
        self._lanes: dict[int, int] = {}

    def lines(self, nodes: Sequence[Node]) -> Iterator[str]:
        """All lines of ``nodes``, without indentation of their own."""
        previous: int | None = None
        for node in nodes:
            yield self.headline(node, previous)
            for line in self.below(node):
                yield INDENT + line
            if (body := shown_body(node)) is not None:
                yield from self._body_lines(node, body)
            previous = node.index

    def _body_lines(self, node: Node, body: NodeList) -> Iterator[str]:
        sizes = node.conditional.body_sizes if node.conditional else ()
        if len(sizes) < 2:
            yield from (INDENT + line for line in self.lines(body))
            return
        start = 0
        for number, size in enumerate(sizes):
            yield f"{INDENT}body {number}:"
            for line in self.lines(body[start : start + size]):
                yield INDENT * 2 + line
            start += size

    def headline(self, node: Node, previous: int | None) -> str:
        """The node on one line. ``previous``: index of the node listed before it."""
        parts = [f"{node.index} {self.title(node)}"]
        if self.detail.shapes and (shape := shape_text(node)):
            parts.append(f" [{shape}]")
        if self.detail.params and (params := params_text(node)):
            parts.append(f" {params}")
        if self.detail.dependencies:
            chained = () if previous is None else (previous,)
            if node.dependencies != chained or node.programmatic_dependencies:
                parts.append(f" after {dependency_text(node)}")
        return "".join(parts)

    def title(self, node: Node) -> str:
        """Kind and name; the kind alone where the name adds nothing."""
        name = self.name(node)
        return str(node.kind) if name == node.kind else f"{node.kind} {name}"

    def name(self, node: Node) -> str:
        short = self._names.get(node.name)
        if short is None:
            short = display_name(node.name, template_arguments=self.detail.template_arguments)
            short = self._names[node.name] = one_line(_ADDRESS.sub("0x", short))
        return short

    def below(self, node: Node) -> Iterator[str]:
        """The detail lines below a node."""
        if self.detail.annotations and node.annotation:
            yield f"scope {self.annotation_text(node.annotation)}"
        if self.detail.modules and node.modules:
            yield f"module {', '.join(node.modules)}"
        for source in self.sources(node):
            yield f"source {source}"
        for frame in self.stack(node):
            yield f"at {frame}"

    def sources(self, node: Node) -> tuple[str, ...]:
        if not self.detail.sources:
            return ()
        return tuple(self._frame(source) for source in node.sources)

    def stack(self, node: Node) -> tuple[str, ...]:
        if not self.detail.stacks or not node.stack:
            return ()
        return tuple(self._frame(frame) for frame in node.stack.splitlines())

    def annotation_text(self, annotation: Mapping[str, Any]) -> str:
        """The name first, then the other entries by key."""
        parts = [scope_name(annotation)] if "name" in annotation else []
        for key in sorted(annotation, key=str):
            if key == "stream" and type(annotation[key]) is int:
                # Lanes are numbered per process; only which nodes share one means something.
                lane = self._lanes.setdefault(annotation[key], len(self._lanes))
                parts.append(f"stream={lane}")
            elif key == "fused" and isinstance(annotation[key], list | tuple):
                scopes = map(self._scope_text, annotation[key])
                parts.append(f"fused from ({') and ('.join(scopes)})")
            elif key != "name":
                parts.append(f"{key}={value_text(annotation[key])}")
        return ", ".join(parts)

    def _scope_text(self, scope: object) -> str:
        return self.annotation_text(scope) if isinstance(scope, Mapping) else value_text(scope)

    def _frame(self, frame: str) -> str:
        text = self._frames.get(frame)
        if text is None:
            text = self._frames[frame] = frame_text(frame, self.detail)
        return text


def shape_text(node: Node) -> str:
    """Launch shape of a kernel; empty for other nodes."""
    parts = []
    for label, dims in (("grid", node.grid), ("block", node.block), ("cluster", node.cluster)):
        if dims is not None:
            parts.append(f"{label} {dim_text(dims)}")
    if node.shared_mem_bytes is not None:
        parts.append(f"shared {node.shared_mem_bytes} B")
    return ", ".join(parts)


def params_text(node: Node) -> str:
    """What a node other than a kernel does, in a few words."""
    if node.memcpy:
        copy = node.memcpy
        return f"{copy.source} to {copy.destination}, {copy.num_bytes} B"
    if node.memset:
        fill = node.memset
        return f"{fill.num_bytes} B with {fill.value:#x} ({fill.element_bytes} B each)"
    if node.mem_ops:
        return ", ".join(node.mem_ops)
    if node.alloc_bytes is not None:
        return f"{node.alloc_bytes} B"
    if node.conditional:
        return node.conditional.decides
    if node.kind is NodeKind.CHILD_GRAPH and node.body is not None:
        return f"of {len(node.body)} nodes"
    return ""


def dim_text(dims: Dim3) -> str:
    return "x".join(map(str, dims))


def dependency_text(node: Node) -> str:
    programmatic = set(node.programmatic_dependencies)
    return (
        ", ".join(f"{index} (programmatic)" if index in programmatic else str(index) for index in node.dependencies)
        or "nothing"
    )


def frame_text(frame: str, detail: Detail) -> str:
    """A "file:line:function" with the file shortened; other text is kept."""
    parts = frame.rsplit(":", 2)
    if len(parts) != 3:
        return one_line(frame)
    file, line, function = parts
    function = _COUNTED_FUNCTION.sub(r"\1", function)
    shown = [file_text(file, detail.relative_to), line, function]
    return one_line(":".join(shown if detail.line_numbers else [shown[0], function]))


def file_text(file: str, relative_to: str | None) -> str:
    """``file`` below ``relative_to``, or its base name; a stable name for generated files."""
    if _NOTEBOOK_CELL.search(file):
        return "<ipython-input>"
    path = PurePath(file)
    if relative_to is not None and path.is_relative_to(relative_to):
        return path.relative_to(relative_to).as_posix()
    base = file if file.startswith("<") else path.name
    for pattern, stable in _COUNTED_FILES:
        base = pattern.sub(stable, base)
    return base


def scope_name(annotation: Mapping[str, Any]) -> str:
    """The name of a scope; several names (a kernel fused from several scopes) are joined."""
    name = annotation.get("name", "")
    if isinstance(name, list | tuple):
        return " + ".join(one_line(str(part)) for part in name)
    return one_line(str(name))


def value_text(value: object) -> str:
    """A value in a stable form: mappings and sets sorted, no address of an object."""
    if isinstance(value, Mapping):
        items = (f"{key}: {value_text(value[key])}" for key in sorted(value, key=str))
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(value_text, value)) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(value_text, value))) + "}"
    return one_line(_OBJECT_AT.sub("", repr(value)))


def one_line(text: str) -> str:
    """``text`` with line breaks and other control characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
