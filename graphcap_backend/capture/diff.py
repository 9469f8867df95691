"""What changed between two captures, node by node."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from graphcap_backend.capture.align import align_levels
from graphcap_backend.capture.bodies import shown_body
from graphcap_backend.capture.nodes import Node, NodeList
from graphcap_backend.capture.render import (
    INDENT,
    Detail,
    NodeText,
    dim_text,
    one_line,
    params_text,
)


class Change(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldChange:
    """One property of a node before and after, as text; "none" where it has none."""

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.field}: {self.before} -> {self.after}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeChange:
    """One node that only one list has, or that both have with something changed."""

    change: Change
    before: Node | None
    """None for an added node."""
    after: Node | None
    """None for a removed node."""
    fields: tuple[FieldChange, ...] = ()
    body: NodeDiff | None = None
    """What changed inside a child graph or a conditional."""
    text: str
    """What the node is, on one line."""

    @property
    def position(self) -> str:
        """Index of the node; "3 -> 4" where a changed node has moved."""
        indices = [str(node.index) for node in (self.before, self.after) if node is not None]
        return " -> ".join(dict.fromkeys(indices))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDiff:
    """All changes in the order of the graph. False when there are none."""

    changes: tuple[NodeChange, ...]

    @property
    def added(self) -> tuple[NodeChange, ...]:
        return self._of(Change.ADDED)

    @property
    def removed(self) -> tuple[NodeChange, ...]:
        return self._of(Change.REMOVED)

    @property
    def changed(self) -> tuple[NodeChange, ...]:
        return self._of(Change.CHANGED)

    def _of(self, kind: Change) -> tuple[NodeChange, ...]:
        return tuple(change for change in self.changes if change.change is kind)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        if not self:
            return "no differences\n"
        counts = [f"{len(found)} {kind}" for kind in Change if (found := self._of(kind))]
        return "\n".join([", ".join(counts) + ":", *self._lines()]) + "\n"

    def _lines(self) -> Iterator[str]:
        marks = {Change.ADDED: "+", Change.REMOVED: "-", Change.CHANGED: "~"}
        for change in self.changes:
            yield f"{marks[change.change]} {change.position} {change.text}"
            for field in change.fields:
                yield f"{INDENT}{field}"
            if change.body is not None:
                yield from (INDENT + line for line in change.body._lines())


def diff(before: NodeList, after: NodeList, detail: Detail) -> NodeDiff:
    """What has to change in ``before`` to become ``after``, as far as ``detail`` looks."""
    # An object each: stream lanes are numbered within a list.
    return _Comparison(before, after, NodeText(detail), NodeText(detail)).run()


class _Comparison:
    """Two node lists on the way to their differences."""

    def __init__(self, before: NodeList, after: NodeList, text_before: NodeText, text_after: NodeText) -> None:
        self.before = before
        self.after = after
        self.texts = (text_before, text_after)
        self.detail = text_before.detail
        self.fields_before = [_fields(node, text_before) for node in before]
        self.fields_after = [_fields(node, text_after) for node in after]

    def run(self) -> NodeDiff:
        pairs = align_levels(self.before, self.after, (self._full_key, self._launch_key, self._name_key))
        waits = _Waits(self.before, self.after, pairs) if self.detail.dependencies else None
        changes: list[NodeChange] = []
        a = b = 0
        for i, j in [*pairs, (len(self.before), len(self.after))]:
            changes.extend(self._removed(node) for node in self.before[a:i])
            changes.extend(self._added(node) for node in self.after[b:j])
            if i < len(self.before):
                fields = _changed_fields(self.fields_before[i], self.fields_after[j])
                if waits is not None:
                    fields += waits.changes(self.before[i], self.after[j])
                body = self._body(shown_body(self.before[i]), shown_body(self.after[j]))
                if fields or body:
                    changes.append(self._changed(self.before[i], self.after[j], fields, body))
            a, b = i + 1, j + 1
        return NodeDiff(changes=tuple(changes))

    def _node(self, of_after: bool, index: int) -> tuple[Node, dict[str, str]]:
        if of_after:
            return self.after[index], self.fields_after[index]
        return self.before[index], self.fields_before[index]

    def _full_key(self, of_after: bool, index: int) -> Hashable:
        node, fields = self._node(of_after, index)
        names = tuple(map(self.texts[of_after].name, node.body or ()))
        return (node.kind, names, *fields.items())

    def _launch_key(self, of_after: bool, index: int) -> Hashable:
        node, fields = self._node(of_after, index)
        return (node.kind, *(fields.get(field) for field in _LAUNCH_FIELDS))

    def _name_key(self, of_after: bool, index: int) -> Hashable:
        node, fields = self._node(of_after, index)
        return node.kind, fields["name"].partition("<")[0]

    def _body(self, before: NodeList | None, after: NodeList | None) -> NodeDiff | None:
        if before is None and after is None:
            return None
        nothing = NodeList(())
        found = _Comparison(before or nothing, after or nothing, *self.texts).run()
        return found or None

    def _removed(self, node: Node) -> NodeChange:
        text = _node_text(node, self.texts[0])
        return NodeChange(change=Change.REMOVED, before=node, after=None, text=text)

    def _added(self, node: Node) -> NodeChange:
        text = _node_text(node, self.texts[1])
        return NodeChange(change=Change.ADDED, before=None, after=node, text=text)

    def _changed(self, before: Node, after: Node, fields: Sequence[FieldChange], body: NodeDiff | None) -> NodeChange:
        return NodeChange(
            change=Change.CHANGED,
            before=before,
            after=after,
            fields=tuple(fields),
            body=body,
            text=self.texts[1].title(after),
        )


_LAUNCH_FIELDS = ("name", "grid", "block", "cluster", "shared", "does")
_FIELDS = (*_LAUNCH_FIELDS, "scope", "module", "source", "stack")


def _fields(node: Node, text: NodeText) -> dict[str, str]:
    """What is compared of a node, apart from edges and bodies: label -> text."""
    detail = text.detail
    fields = {"name": text.name(node)}
    if detail.shapes:
        for label, dims in (("grid", node.grid), ("block", node.block), ("cluster", node.cluster)):
            if dims is not None:
                fields[label] = dim_text(dims)
        if node.shared_mem_bytes is not None:
            fields["shared"] = f"{node.shared_mem_bytes} B"
    # A child graph's size is no property of its own: its body is compared node by node.
    if detail.params and node.body is None and (does := params_text(node)):
        fields["does"] = does
    if detail.annotations and node.annotation:
        fields["scope"] = text.annotation_text(node.annotation)
    if detail.modules and node.modules:
        fields["module"] = ", ".join(node.modules)
    if sources := text.sources(node):
        fields["source"] = ", ".join(sources)
    if stack := text.stack(node):
        fields["stack"] = " < ".join(stack)
    return fields


def _changed_fields(before: Mapping[str, str], after: Mapping[str, str]) -> list[FieldChange]:
    return [
        FieldChange(field=label, before=before.get(label, "none"), after=after.get(label, "none"))
        for label in _FIELDS
        if before.get(label) != after.get(label)
    ]


def _node_text(node: Node, text: NodeText) -> str:
    """A node on one line, with its scope and sources but without its dependencies."""
    fields = _fields(node, text)
    parts = [text.title(node)]
    parts.extend(f"{label} {fields[label]}" for label in ("grid", "block", "cluster", "shared") if label in fields)
    if text.detail.params and (does := params_text(node)):
        parts.append(does)
    parts.extend(f"{label} {fields[label]}" for label in ("scope", "source") if label in fields)
    return one_line("; ".join(parts))


class _Waits:
    """Compares what matched nodes wait for, in terms of matched nodes only.

    A dependency on an added or removed node stands for what that node waits for itself: taking
    one node out of a chain does not change the next one.
    """

    def __init__(self, before: NodeList, after: NodeList, pairs: Sequence[tuple[int, int]]) -> None:
        self._to_after = {before[i].index: after[j].index for i, j in pairs}
        self._to_before = {new: old for old, new in self._to_after.items()}
        self._before = {node.index: node for node in before}
        self._after = {node.index: node for node in after}

    def changes(self, before: Node, after: Node) -> list[FieldChange]:
        """The changed dependencies, in indices of the list after."""
        waited = _resolve(before, self._before, self._to_after)
        old = {self._to_after[index] for index in waited}
        new = _resolve(after, self._after, self._to_before)
        found = []
        if old != new:
            found.append(_waits_for("waits for", old, new))
        matched = self._to_before.keys()
        old_early = {self._to_after[i] for i in before.programmatic_dependencies if i in self._to_after}
        new_early = {i for i in after.programmatic_dependencies if i in matched}
        # Of an edge that is gone or new, the line above tells already.
        old_early, new_early = old_early & new, new_early & old
        if old_early != new_early:
            found.append(_waits_for("programmatic edge from", old_early, new_early))
        return found


def _waits_for(label: str, old: set[int], new: set[int]) -> FieldChange:
    def text(indices: set[int]) -> str:
        return ", ".join(map(str, sorted(indices))) or "nothing"

    return FieldChange(field=label, before=text(old), after=text(new))


def _resolve(node: Node, nodes: Mapping[int, Node], matched: Mapping[int, int]) -> set[int]:
    """The matched nodes that ``node`` waits for, directly or through unmatched ones."""
    found: set[int] = set()
    passed: set[int] = set()
    pending = list(node.dependencies)
    while pending:
        index = pending.pop()
        if index in matched:
            found.add(index)
        elif index in nodes and index not in passed:
            passed.add(index)
            pending.extend(nodes[index].dependencies)
    return found
