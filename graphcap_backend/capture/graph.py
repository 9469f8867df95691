"""``graph``: the context manager that users capture with."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from graphcap_backend.capture.session import CaptureSession

if TYPE_CHECKING:
    from graphcap_backend.annotate.config import AnnotationConfig
    from graphcap_backend.capture.host import HostGraph


class graph:
    """Capture the work of a ``with`` block into a graph for later replay.

    Takes what ``torch.cuda.graph`` of torch 2.15 takes, in its order, on every supported torch; a
    :class:`HostGraph` in place of the CUDA graph captures work on CPU tensors. An instance may be
    entered again after its graph was reset.

    Args:
        cuda_graph: the graph to capture into. It must hold no capture.
        pool: token of :func:`graph_pool_handle` or of another graph's ``pool()``, or a
            ``torch.cuda.MemPool``, whose memory this capture may share. The graph keeps a MemPool alive.
        stream: the stream to capture on. By default one of graphcap's own on the current device, the
            same one for each capture, so that captures which share a pool do share memory.
        capture_error_mode: "global", "thread_local" or "relaxed": whose unsafe CUDA calls are errors
            while the capture runs: every thread's, this thread's, nobody's.
        enable_annotations: record the scopes of :func:`mark_kernels` for each node.
        annotation_config: options of the recording, used with ``enable_annotations``: "backend",
            "key_by", "record_py_stacks", "py_stack_filter_paths".
        check_input_liveness: note the tensors from outside that the block reads, and make
            ``replay()`` raise :class:`InputLivenessError` once one of them was freed.

    Raises:
        TypeError, ValueError: an argument is not what it must be.
        NestedCaptureError: entered inside another capture on the same thread, which goes on unharmed.
        CaptureError: the capture could not begin or end. Nothing of it stays behind.
    """

    def __init__(
        self,
        cuda_graph: torch.cuda.CUDAGraph | HostGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        enable_annotations: bool = False,
        annotation_config: Mapping[str, Any] | None = None,
        check_input_liveness: bool = False,
    ) -> None:
        for name, value in (
            ("enable_annotations", enable_annotations),
            ("check_input_liveness", check_input_liveness),
        ):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, found {value!r}")
        self._graph = cuda_graph
        self._options: dict[str, Any] = {
            "pool": pool,
            "stream": stream,
            "capture_error_mode": capture_error_mode,
            "annotations": _annotations(enable_annotations, annotation_config),
            "check_input_liveness": check_input_liveness,
        }
        self._session = CaptureSession(cuda_graph, **self._options)

    def __enter__(self) -> None:
        if self._session.state in ("captured", "failed"):
            self._session = CaptureSession(self._graph, **self._options)
        self._session.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)


def _annotations(enabled: bool, config: Mapping[str, Any] | None) -> AnnotationConfig | None:
    if not enabled and config is None:
        return None
    from graphcap_backend.annotate.config import AnnotationConfig

    parsed = AnnotationConfig.parse(config)  # wrong options are an error whether they are used or not
    return parsed if enabled else None
