"""Times of a capture's nodes, and their sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphcap_backend.annotate.profile import Share, Timing, Weighed, scope_names, share_out
from graphcap_backend.capture.kernel_names import display_name

if TYPE_CHECKING:
    from graphcap_backend.capture.nodes import Node
    from graphcap_backend.show.saved import SavedCapture

NO_LINE = "(no source line)"
NO_SCOPE = "(no scope)"
NO_MODULE = "(no module)"
_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTime:
    """What one node took, over all replays that were measured."""

    graph: int
    """Position in the capture's ``graphs``."""
    path: tuple[int, ...]
    """Indices that lead to the node: its own at the top level, the child node's first for a node of a body."""
    node: Node
    labels: Node
    """The node that scope, stack and lines are known for: ``node``, or the child node that it is inside."""
    timing: Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideTime:
    """Work that ran meanwhile and belongs to no captured graph: input copies, code that is not captured."""

    name: str
    timing: Timing


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Where the time of replays went. ``str()`` gives the heaviest source lines, and modules where most has no line.

    Times are nanoseconds, over all ``num_calls`` together. Each ``by_...`` shares the time of all nodes out
    without counting any twice: its weights sum up to ``nodes_ns``. A kernel fused from several lines (scopes,
    modules) gives each an equal part, which is also in that row's ``shared``.
    """

    capture: SavedCapture
    clock: str
    """"cuda": activity records of the GPU. "cpu": how long each launch took on the host."""
    num_calls: int
    times: tuple[NodeTime, ...]
    outside: tuple[OutsideTime, ...] = ()

    @property
    def nodes_ns(self) -> int:
        """Time of all nodes."""
        return sum(time.timing.total_ns for time in self.times)

    @property
    def total_ns(self) -> int:
        """Time of all that was recorded: nodes, and work outside of the graphs."""
        return self.nodes_ns + sum(time.timing.total_ns for time in self.outside)

    def by_line(self) -> tuple[Share, ...]:
        """By source line ("file:line:function"), heaviest first."""
        return self._shares(lambda node: node.sources, NO_LINE)

    def by_scope(self) -> tuple[Share, ...]:
        """By scope; backward work apart."""
        return self._shares(lambda node: scope_names(node.annotation), NO_SCOPE)

    def by_module(self) -> tuple[Share, ...]:
        """By module path, where the compiler kept it."""
        return self._shares(lambda node: node.modules, NO_MODULE)

    def by_kernel(self) -> tuple[Share, ...]:
        """By kernel, copy or fill, under the names that ``NodeList.render`` shows."""
        return share_out(
            (Weighed((display_name(time.node.name),), time.timing.total_ns, time.timing.count) for time in self.times),
            "",
        )

    def _shares(self, labels: Callable[[Node], Sequence[str]], unlabelled: str) -> tuple[Share, ...]:
        return share_out(
            (Weighed(labels(time.labels), time.timing.total_ns, time.timing.count) for time in self.times), unlabelled
        )

    def __str__(self) -> str:
        where = "on the GPU" if self.clock == "cuda" else "of launches on the CPU"
        per_call = self.nodes_ns / self.num_calls / 1000
        lines = [f"{per_call:.1f} us {where} a call, over {self.num_calls} calls; by source line:"]
        by_line = self.by_line()
        lines += share_lines(by_line[:_SHOWN], self.nodes_ns)
        lines += module_lines(by_line, self.by_module(), self.nodes_ns)
        if self.outside:
            outside = (self.total_ns - self.nodes_ns) / self.num_calls / 1000
            lines.append(f"{outside:.1f} us a call outside of the graphs (input copies, code that is not captured)")
        return "\n".join(lines)


def share_lines(shares: Sequence[Share], total: int) -> list[str]:
    """A row of text per share: its percent of ``total``, how much of that is shared with others, the label."""
    rows = []
    for share in shares:
        percent = 100 * share.weight / total if total else 0.0
        shared = f"{100 * share.shared / share.weight:3.0f}% of it shared" if share.shared else ""
        rows.append(f"{percent:6.1f}%  {shared:18}  {share.num_nodes:4d} nodes  {share.label}")
    return rows


def module_lines(by_line: Sequence[Share], by_module: Sequence[Share], total: int) -> list[str]:
    """The heaviest modules as rows below a heading; none where lines tell more, or no module is known."""
    without_line = sum(share.weight for share in by_line if share.label == NO_LINE)
    if 2 * without_line <= total or all(share.label == NO_MODULE for share in by_module):
        return []
    return [
        "by module (most has no source line: the lines are torch's own, as in a bare nn.Sequential):",
        *share_lines(by_module[:_SHOWN], total),
    ]


def nodes_by(capture: SavedCapture, labels: Callable[[Node], Sequence[str]], unlabelled: str) -> tuple[Share, ...]:
    """Where nothing was timed: nodes by label, most first.

    ``weight`` is a number of nodes. One with several labels counts for each, and in its ``shared``.
    """
    total: Counter[str] = Counter()
    shared: Counter[str] = Counter()
    for graph in capture.graphs:
        for node in graph.nodes:
            names = list(dict.fromkeys(labels(node))) or [unlabelled]
            total.update(names)
            if len(names) > 1:
                shared.update(names)
    return tuple(
        Share(label=label, weight=number, shared=shared[label], num_nodes=number, count=0)
        for label, number in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    )
