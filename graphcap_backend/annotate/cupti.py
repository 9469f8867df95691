"""libcupti: node-creation callbacks, ids of graphs and nodes. The one file that calls it.

CUPTI allows one subscription a process, and what is safe is narrow (measured, see
DESIGN.md): hold it only while a capture records, with callbacks only, and finalize after
unsubscribing, or every later replay is half as slow again on the host. Where subscribing
answers that somebody else holds CUPTI, nothing of it may be touched: finalizing it then
crashes the next replay.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from graphcap_backend.annotate.process import PROCESS
from graphcap_backend.errors import CuptiBusyError, CuptiError, CuptiMissingError

_DOMAIN_RESOURCE: Final = 3
_GRAPHNODE_CREATED: Final = 13
_MAX_LIMIT_REACHED: Final = 12
_MULTIPLE_SUBSCRIBERS: Final = 39
_DESCRIPTOR_OFFSET: Final = 16
"""Of ``resourceDescriptor`` in CUpti_ResourceData, after context and resource handle."""

_BUSY_ADVICE: Final = (
    "CUPTI allows one subscription a process and somebody else holds it: torch.profiler "
    "keeps it for good after its first profile, Nsight and compute-sanitizer hold it from "
    'the start. Capture before the first profile, or use annotation_config={"backend": '
    '"auto"} without "record_py_stacks"'
)


class _GraphData(ctypes.Structure):
    _fields_ = (
        ("graph", ctypes.c_void_p),
        ("original_graph", ctypes.c_void_p),
        ("node", ctypes.c_void_p),
        ("original_node", ctypes.c_void_p),
        ("node_type", ctypes.c_int),
        ("dependency", ctypes.c_void_p),
        ("graph_exec", ctypes.c_void_p),
    )


_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class NodeCallbacks:
    """The subscription, shared by all recordings of the process that use it."""

    def __init__(self) -> None:
        """Subscribe and have node creation reported.

        Raises:
            CuptiMissingError: there is no libcupti to call, or it lacks a function.
            CuptiBusyError: somebody else holds CUPTI.
            CuptiError: it answered something else; nothing of ours stays.
        """
        self.num_users = 0
        library = _library()
        # Kept as long as CUPTI may call it.
        self._callback = _Callback(_make_callback())
        self._handle = ctypes.c_void_p()
        result = library.cuptiSubscribe(ctypes.byref(self._handle), self._callback, None)
        if result in (_MULTIPLE_SUBSCRIBERS, _MAX_LIMIT_REACHED):
            raise CuptiBusyError("cuptiSubscribe", _result_name(library, result), _BUSY_ADVICE)
        _check(library, "cuptiSubscribe", result)
        try:
            self._enable(library, 1)
        except CuptiError:
            self._unsubscribe(library)
            raise

    def close(self) -> None:
        """Give CUPTI back, so that replays cost what they did before.

        Raises:
            CuptiError: naming the first call that failed; the others were made all the same.
        """
        library = _library()
        try:
            self._enable(library, 0)
        finally:
            self._unsubscribe(library)

    def _enable(self, library: ctypes.CDLL, enable: int) -> None:
        result = library.cuptiEnableCallback(enable, self._handle, _DOMAIN_RESOURCE, _GRAPHNODE_CREATED)
        _check(library, "cuptiEnableCallback", result)

    def _unsubscribe(self, library: ctypes.CDLL) -> None:
        _check(library, "cuptiUnsubscribe", library.cuptiUnsubscribe(self._handle))
        # With cupti-python in the process its user may have activity records on, which need
        # no subscription; a replay after finalizing then is a fault. Slow replays are better.
        if "cupti.cupti" not in sys.modules:
            _check(library, "cuptiFinalize", library.cuptiFinalize())


def acquire_callbacks() -> None:
    """Have node creation reported to the recordings in ``PROCESS.by_graph``.

    Raises: as ``NodeCallbacks``.
    """
    with PROCESS.lock:
        if PROCESS.callbacks is None:
            PROCESS.callbacks = NodeCallbacks()
        PROCESS.callbacks.num_users += 1


def release_callbacks() -> None:
    """Undo one ``acquire_callbacks``; the last one gives CUPTI back, or leaves that to ``asked_together``."""
    with PROCESS.lock:
        if PROCESS.callbacks is None:
            return
        PROCESS.callbacks.num_users -= 1
        _close_if_unused()


def _close_if_unused() -> None:
    callbacks = PROCESS.callbacks
    if callbacks is None or callbacks.num_users or PROCESS.num_asking:
        return
    PROCESS.callbacks = None
    callbacks.close()


@contextmanager
def asked_together() -> Iterator[None]:
    """For a block of questions: CUPTI comes up with the first that needs it, and goes at the end of the block.

    Up and down again is some 12 ms. What goes wrong on the way down is a warning: the answers are good.
    """
    with PROCESS.lock:
        PROCESS.num_asking += 1
    try:
        yield
    finally:
        with PROCESS.lock:
            PROCESS.num_asking -= 1
            try:
                _close_if_unused()
            except CuptiError as error:
                PROCESS.warn_once("cupti release", f"giving CUPTI back failed: {error}")


def _make_callback() -> Callable[[Any, int, int, int], None]:
    # Runs once per node inside the launching call: every name is bound here once, and only
    # one structure is built.
    recordings = PROCESS.by_graph
    address = ctypes.c_size_t.from_address
    graph_data = _GraphData.from_address

    def on_created(_user: Any, _domain: int, _callback_id: int, data: int) -> None:
        recording = None
        try:
            created = graph_data(address(data + _DESCRIPTOR_OFFSET).value)
            graph = created.graph
            recording = recordings.get(graph)
            if recording is not None:
                recording.on_node(graph, created.node)
        except BaseException as error:  # noqa: BLE001 - must not reach CUPTI's C code
            if recording is not None:
                recording.note_failure(error)

    return on_created


def node_id(node: int) -> int:
    """CUPTI's id of a ``cudaGraphNode_t``: graph id in the high 32 bits, node id in the low.

    Raises:
        CuptiMissingError, CuptiError.
    """
    library = _library()
    value = ctypes.c_uint64()
    result = library.cuptiGetGraphNodeId(ctypes.c_void_p(node), ctypes.byref(value))
    _check(library, "cuptiGetGraphNodeId", result)
    return value.value


def graph_id(graph: int) -> int:
    """CUPTI's id of a ``cudaGraph_t``. Raises: as ``node_id``."""
    return _id_of("cuptiGetGraphId", graph)


def graph_exec_id(graph_exec: int) -> int:
    """CUPTI's id of a ``cudaGraphExec_t``. Raises: as ``node_id``.

    Merely asking brings CUPTI up and makes all later replays slower, so it is asked under a subscription
    of ours, which ends with a finalize. Where somebody else has CUPTI, it is up already.
    """
    with asked_together():
        try:
            acquire_callbacks()
        except CuptiBusyError:
            return _id_of("cuptiGetGraphExecId", graph_exec)
        try:
            return _id_of("cuptiGetGraphExecId", graph_exec)
        finally:
            release_callbacks()


def _id_of(function: str, handle: int) -> int:
    library = _library()
    value = ctypes.c_uint32()
    result = getattr(library, function)(ctypes.c_void_p(handle), ctypes.byref(value))
    _check(library, function, result)
    return value.value


def version() -> int:
    """Version of libcupti as it reports it, 130400 for 13.4. Raises: as ``node_id``."""
    library = _library()
    value = ctypes.c_uint32()
    _check(library, "cuptiGetVersion", library.cuptiGetVersion(ctypes.byref(value)))
    return value.value


def is_loadable() -> bool:
    """Whether there is a libcupti with all that is needed; nothing in it is called."""
    try:
        _library()
    except CuptiMissingError:
        return False
    return True


def _check(library: ctypes.CDLL, function: str, result: int) -> None:
    if result != 0:
        raise CuptiError(function, _result_name(library, result))


def _result_name(library: ctypes.CDLL, result: int) -> str:
    text = ctypes.c_char_p()
    if library.cuptiGetResultString(ctypes.c_int(result), ctypes.byref(text)) != 0:
        return f"result {result}"
    return f"{(text.value or b'').decode(errors='replace')} ({result})"


_FUNCTIONS: Final = (
    "cuptiSubscribe",
    "cuptiUnsubscribe",
    "cuptiEnableCallback",
    "cuptiFinalize",
    "cuptiGetResultString",
    "cuptiGetVersion",
    "cuptiGetGraphId",
    "cuptiGetGraphExecId",
    "cuptiGetGraphNodeId",
)


@cache
def _library() -> ctypes.CDLL:
    """The libcupti that torch uses.

    Raises:
        CuptiMissingError: saying what was found, what is needed and what to do.
    """
    import torch

    if torch.version.cuda is None:
        raise _missing(f"torch {torch.__version__} is built without CUDA", "torch for CUDA")
    major = int(torch.version.cuda.partition(".")[0])
    tried = []
    for path in _candidates(major):
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            tried.append(f"{path} ({error})")
            continue
        absent = [name for name in _FUNCTIONS if not hasattr(library, name)]
        if absent:
            raise _missing(f"{path}, which lacks {', '.join(absent)}", f"CUPTI {major}")
        return library
    others = [path for path in _loaded() if _major_of(path) != major]
    found = f"libcupti of another major, {others[0]}" if others else "no libcupti"
    raise _missing(f"{found}; tried {', '.join(tried)}", f"libcupti.so.{major}")


def _missing(found: str, needed: str) -> CuptiMissingError:
    return CuptiMissingError(
        "loading libcupti",
        f"found {found}; needed {needed}",
        "pip install nvidia-cuda-cupti of the CUDA version torch was built for",
    )


def _candidates(major: int) -> Iterator[str]:
    """Where the library may be, best first: the copy already in the process is torch's."""
    for path in _loaded():
        if _major_of(path) == major:
            yield path
    for package, folder in ((f"nvidia.cu{major}", "lib"), ("nvidia.cuda_cupti", "lib")):
        for root in _package_roots(package):
            file = Path(root, folder, f"libcupti.so.{major}")
            if file.exists():
                yield str(file)
    yield f"libcupti.so.{major}"


def _loaded() -> list[str]:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if "libcupti.so" in line)
    return list(dict.fromkeys(paths))


def _major_of(path: str) -> int | None:
    _, _, suffix = Path(path).name.partition("libcupti.so.")
    digits = suffix.partition(".")[0]
    return int(digits) if digits.isdigit() else None


def _package_roots(package: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    return list(spec.submodule_search_locations or ()) if spec is not None else []
