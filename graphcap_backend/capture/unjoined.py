"""Work on a forked stream that never joined back: finding it, and where it was launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphcap_backend.capture import driver
from graphcap_backend.errors import UnjoinedStreamError

if TYPE_CHECKING:
    from graphcap_backend.annotate.recording import Recording

_JOIN = (
    "a stream was forked off the capturing stream and did not join back before the capture ended. Let the "
    "capturing stream wait for it at the end of the block: torch.cuda.current_stream().wait_stream(side_stream)"
)
_HOW_TO_SEE = 'To see where, capture again with enable_annotations=True, annotation_config={"record_py_stacks": True}'


def first_unjoined(
    nodes: Sequence[int], sources: Sequence[int], targets: Sequence[int], frontier: Sequence[int]
) -> int | None:
    """Position of the first node that the frontier does not depend on, or None.

    Args:
        nodes: handles in creation order.
        sources, targets: handles, of the nodes where each edge begins and ends.
        frontier: handles that the capturing stream's next work would wait for.
    """
    if set(nodes).difference(sources) <= set(frontier):  # all ends, so all nodes; the others need a search
        return None
    before: dict[int, list[int]] = {}
    for source, target in zip(sources, targets, strict=True):
        before.setdefault(target, []).append(source)
    joined, waiting = set(frontier), list(frontier)
    while waiting:
        for node in before.get(waiting.pop(), ()):
            if node not in joined:
                joined.add(node)
                waiting.append(node)
    return next(index for index, node in enumerate(nodes) if node not in joined)


class _CaptureAboutToFail:
    """GraphKeys of a capture that is read once more before it is dropped."""

    source_graph_id = 0

    def exec_graph_id(self) -> int | None:
        return None

    def alive(self) -> bool:
        return True


def check_joined(info: driver.CaptureInfo, recording: Recording) -> None:
    """Raise for a fork left open, with the stack of its first node, which only a recording has.

    Called just before the capture ends: afterwards the driver has dropped the graph.

    Raises:
        UnjoinedStreamError: there is such a fork.
    """
    index = first_unjoined(driver.graph_nodes(info.graph), *driver.edges(info.graph), info.frontier)
    if index is None:
        return
    stack = recording.seal(_CaptureAboutToFail()).stack(index)
    where = f"Its first work, node {index}, was launched at:\n{stack}" if stack else _HOW_TO_SEE
    raise UnjoinedStreamError(f"{_JOIN}. {where}")


def unjoined_error() -> UnjoinedStreamError:
    """The error for a fork that the driver found, where nothing was recorded."""
    return UnjoinedStreamError(f"{_JOIN}. {_HOW_TO_SEE}")
