"""The one process-wide object: who is recording now, and weak tables of what was recorded."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

if TYPE_CHECKING:
    from graphcap_backend.annotate.cupti import NodeCallbacks
    from graphcap_backend.annotate.node_hooks import AnomalyHooks
    from graphcap_backend.annotate.origins import WrapperOrigins
    from graphcap_backend.annotate.recording import Recording
    from graphcap_backend.annotate.registry import GraphRecord
    from graphcap_backend.annotate.stacks import Provenance

_FIRST_LANE: Final = 60


class Process:
    """What all captures of a process share.

    Everything that outlives a capture is held weakly: a record dies with its graph, a
    wrapper's origins with the compiled region. ``lock`` guards what is not a single
    dictionary operation; it is re-entrant because a finalizer may run while it is held.
    """

    def __init__(self) -> None:
        self.lock: Final = threading.RLock()
        self.num_recording = 0
        """Recordings between start and stop. Scopes are no-ops while it is zero."""
        self.by_graph: Final[dict[int, Recording]] = {}
        """Graph under construction (``cudaGraph_t``) to its recording; read per node."""
        self.callbacks: NodeCallbacks | None = None
        """The CUPTI subscription, while at least one recording uses it."""
        self.num_asking = 0
        """Blocks under way that ask CUPTI for ids; it is not given back before the last has ended."""
        self.anomaly_hooks: AnomalyHooks | None = None
        """What autograd tells of new nodes before torch 2.14, while something records."""
        self.records: Final[WeakSet[GraphRecord]] = WeakSet()
        self.wrappers: Final[WeakSet[WrapperOrigins]] = WeakSet()
        self.last_provenance: weakref.ref[Provenance] | None = None
        self._warned: Final[set[str]] = set()
        self._lanes: Final[dict[int, int]] = {}

    def warn_once(self, topic: str, message: str, stacklevel: int = 3) -> None:
        """Warn the first time ``topic`` comes up in this process."""
        with self.lock:
            if topic in self._warned:
                return
            self._warned.add(topic)
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)

    def lane(self, stream: int) -> int:
        """A small number that stands for a stream in traces, above those of real streams."""
        with self.lock:
            return self._lanes.setdefault(stream, _FIRST_LANE + len(self._lanes))


PROCESS: Final = Process()
