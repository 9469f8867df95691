"""graphcap: a ``torch.compile`` backend and a capture API for CUDA graphs.

``torch.compile(model, backend="graphcap")`` needs no import. What else there is, is named in
``__all__`` and loaded when first used: importing this package loads neither torch nor CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# Not lazy: a later import of the module of this name would hide the function.
from graphcap_backend.report import report

if TYPE_CHECKING:
    from graphcap_backend.annotate.registry import (
        dump_kernel_py_stacks,
        get_kernel_annotations,
        get_kernel_py_stacks,
        is_available,
        load_kernel_py_stacks,
        resolve_pending_annotations,
    )
    from graphcap_backend.annotate.scopes import mark_kernels, mark_stream
    from graphcap_backend.capture.graph import graph
    from graphcap_backend.capture.host import HostGraph
    from graphcap_backend.capture.nodes import Node, NodeKind, NodeList
    from graphcap_backend.capture.pool import graph_pool_handle
    from graphcap_backend.capture.record import capture_nodes
    from graphcap_backend.capture.skip import SkipKind, SkipReason
    from graphcap_backend.errors import (
        CaptureError,
        CudaError,
        CuptiBusyError,
        CuptiError,
        CuptiMissingError,
        DriverError,
        GraphcapError,
        InputLivenessError,
        NestedCaptureError,
        NotWarmedUpError,
        SavedCaptureError,
        SkippedError,
        UnjoinedStreamError,
    )
    from graphcap_backend.options import GraphcapOptions
    from graphcap_backend.show.flame import write_flame_graph
    from graphcap_backend.show.measure import profile_replays
    from graphcap_backend.show.page import write_page
    from graphcap_backend.show.precapture import precapture
    from graphcap_backend.show.profile import Profile
    from graphcap_backend.show.saved import SavedCapture, load_capture, save_capture
    from graphcap_backend.show.tracing import annotate_trace

    __version__: str

__all__ = [
    "CaptureError",
    "CudaError",
    "CuptiBusyError",
    "CuptiError",
    "CuptiMissingError",
    "DriverError",
    "GraphcapError",
    "GraphcapOptions",
    "HostGraph",
    "InputLivenessError",
    "NestedCaptureError",
    "Node",
    "NodeKind",
    "NodeList",
    "NotWarmedUpError",
    "Profile",
    "SavedCapture",
    "SavedCaptureError",
    "SkipKind",
    "SkipReason",
    "SkippedError",
    "UnjoinedStreamError",
    "__version__",
    "annotate_trace",
    "capture_nodes",
    "dump_kernel_py_stacks",
    "get_kernel_annotations",
    "get_kernel_py_stacks",
    "graph",
    "graph_pool_handle",
    "is_available",
    "load_capture",
    "load_kernel_py_stacks",
    "mark_kernels",
    "mark_stream",
    "precapture",
    "profile_replays",
    "report",
    "resolve_pending_annotations",
    "save_capture",
    "write_flame_graph",
    "write_page",
]

# Module (below this package) -> the public names it defines.
_HOMES = {
    "annotate.registry": (
        "dump_kernel_py_stacks",
        "get_kernel_annotations",
        "get_kernel_py_stacks",
        "is_available",
        "load_kernel_py_stacks",
        "resolve_pending_annotations",
    ),
    "annotate.scopes": ("mark_kernels", "mark_stream"),
    "capture.graph": ("graph",),
    "capture.host": ("HostGraph",),
    "capture.nodes": ("Node", "NodeKind", "NodeList"),
    "capture.pool": ("graph_pool_handle",),
    "capture.record": ("capture_nodes",),
    "capture.skip": ("SkipKind", "SkipReason"),
    "options": ("GraphcapOptions",),
    "show.flame": ("write_flame_graph",),
    "show.measure": ("profile_replays",),
    "show.page": ("write_page",),
    "show.precapture": ("precapture",),
    "show.profile": ("Profile",),
    "show.saved": ("SavedCapture", "load_capture", "save_capture"),
    "show.tracing": ("annotate_trace",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    import importlib

    if name == "__version__":
        from importlib.metadata import version

        value: object = version("graphcap-backend")
    elif name in __all__:
        module = importlib.import_module(f"{__name__}.{_HOME_OF.get(name, 'errors')}")
        value = getattr(module, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its public names are in __all__")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
