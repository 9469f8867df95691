"""Labels for traces that torch.profiler exported, from captures of this process or from a saved one."""

from __future__ import annotations

import os
from typing import Any

from graphcap_backend.annotate.trace import AnnotatedTrace, label_trace
from graphcap_backend.annotate.trace_join import TraceGraph
from graphcap_backend.show.saved import load_capture, saved_graphs_of_this_process, snapshot


def annotate_trace(src: str | os.PathLike[str], dst: str | os.PathLike[str], *, capture: Any = None) -> AnnotatedTrace:
    """Say in a Chrome trace which line of the model each kernel of a graph replay comes from.

    Reads what ``torch.profiler`` exported (".json" or ".json.gz") and writes a trace for Perfetto or
    chrome://tracing in which the GPU events of replays have scope, source lines, stack and node index in their
    args, and scopes have lanes. All other events stay as they are written. ``src`` is never changed; ``dst`` is
    there in whole or not at all.

    An event is labelled only where it is certain which node it is: by graph node id where the trace has ids
    (newer torch), else by the order of launches within a replay, checked kernel name by kernel name. Others
    are counted in the result, by reason.

    Args:
        capture: what was replayed: a path that :func:`save_capture` wrote, a compiled function or a captured
            graph, or a :class:`SavedCapture`. None takes all captured graphs of this process.

    Raises:
        ValueError: ``src`` is no such trace, is cut off, or was annotated before.
        SavedCaptureError: ``capture`` is a file that is no saved capture.
        OSError: a file can't be read or written.
    """
    if capture is None:
        graphs = saved_graphs_of_this_process()
    elif isinstance(capture, (str, os.PathLike)):
        graphs = list(load_capture(capture).graphs)
    else:
        graphs = list(snapshot(capture, "annotate_trace(src, dst, capture=...)").graphs)
    return label_trace(
        src, dst, [TraceGraph(name=graph.name, exec_id=graph.exec_graph_id, nodes=graph.nodes) for graph in graphs]
    )
