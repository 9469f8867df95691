"""The node-creation handler of torch 2.15, run on the torch at hand.

Its file is executed as it is; what it imports from a torch 2.15 that is not here is stood in for: the node's
id comes from ``cuptiGetGraphNodeId`` (the driver call it makes needs 13.1), CUPTI's structures are read by
ctypes, which is faster than any cupti-python, and annotations and stacks go into plain dicts without its lock.
So it costs here no more than in its own torch: a bound from below.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from graphcap_backend.annotate.cupti import _GraphData

ENVIRONMENT = "GRAPHCAP_PEER_HANDLER"
MODULE = "torch.cuda._graph_node_callbacks"
HINT = (
    "no handler of torch 2.15 to compare with: give its file by --peer FILE or "
    f"{ENVIRONMENT}=FILE; it is torch/cuda/_graph_node_callbacks.py in the wheel"
)

_DOMAIN_RESOURCE = 3
_GRAPHNODE_CREATED = 13


def find_peer(given: str | None) -> Path | None:
    """The handler's file: as given, else from the environment, else of the torch that is installed.

    Raises:
        FileNotFoundError: a file was named that does not exist.
    """
    named = given or os.environ.get(ENVIRONMENT)
    if named:
        path = Path(named)
        if not path.is_file():
            raise FileNotFoundError(f"the peer handler {named} does not exist")
        return path.resolve()
    spec = importlib.util.find_spec(MODULE)
    return Path(spec.origin) if spec is not None and spec.origin else None


class _ResourceData(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("resource", ctypes.c_void_p),
        ("resource_descriptor", ctypes.c_void_p),
    )


class PeerHandler:
    """Torch 2.15's handler, with stacks on and one scope open.

    Args:
        path: its file.
        node_id: (graph id << 32) | node id of a ``cudaGraphNode_t``.
    """

    def __init__(self, path: Path, node_id: Callable[[int], int]) -> None:
        self.annotations: dict[int, dict[str, Any]] = {}
        self.stacks: dict[int, str] = {}
        self._stand_ins = self._make_stand_ins(node_id)
        self._namespace: dict[str, Any] = {
            "__name__": MODULE,
            "__builtins__": {**vars(builtins), "__import__": self._import},
        }
        # Under the name it has in torch, so that its filter leaves its own frame out.
        name = str(Path(*torch.__path__[:1], "cuda", path.name))
        exec(compile(path.read_text(encoding="utf-8"), name, "exec"), self._namespace)
        self._namespace["_RECORD_PY_STACKS"] = True
        self._namespace["_STACK_ROOTS"] = self._namespace["_stack_filter_roots"](None)
        self.on_created: Callable[[int, int, int], None] = self._namespace["_on_graph_node_created"]

    def clear(self) -> None:
        """Forget the last capture, and the caches that the handler keeps for one capture."""
        self.annotations.clear()
        self.stacks.clear()
        self._namespace["_STACK_CACHE"].clear()
        self._namespace["_NOISE_CACHE"].clear()

    def _import(self, name: str, namespace: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        found = self._stand_ins.get(name)
        return found if found is not None else builtins.__import__(name, namespace, local, names, level)

    def _make_stand_ins(self, node_id: Callable[[int], int]) -> dict[str, Any]:
        annotation = {"name": "work"}
        any_type = set(range(32))
        graph_id = 0

        def tools_id(node: int) -> int:
            nonlocal graph_id
            found = node_id(node)
            graph_id = found >> 32
            return found

        def record_node_annotation(key: int, value: dict[str, Any]) -> None:
            self.annotations[key] = dict(value)

        def record_node_py_stack(key: int, stack: str) -> None:
            self.stacks[key] = stack

        return {
            "cuda.bindings": SimpleNamespace(runtime=SimpleNamespace(cudaGraphNodeGetToolsId=tools_id)),
            "cupti": SimpleNamespace(
                cupti=SimpleNamespace(
                    GraphData=SimpleNamespace(from_ptr=_GraphData.from_address),
                    ResourceData=SimpleNamespace(from_ptr=_ResourceData.from_address),
                )
            ),
            "torch.cuda._utils": SimpleNamespace(_check_cuda_bindings=lambda value: value),
            "torch.cuda._graph_annotations": SimpleNamespace(
                _get_annotatable_types=lambda: any_type,
                capture_root_graph_id=lambda: graph_id,
                current_annotation=lambda: annotation,
                node_type_has_source_id=lambda _: True,
                note_body_graph_id=lambda _: None,
                note_sourceless_node=lambda _: None,
                record_node_annotation=record_node_annotation,
                record_node_py_stack=record_node_py_stack,
                source_keyed=lambda: False,
            ),
        }


class PeerSubscription:
    """Has CUPTI call the handler, by ctypes, while ``recording`` is open; gives CUPTI back afterwards."""

    def __init__(self, path: Path) -> None:
        from graphcap_backend.annotate import cupti

        self._library = cupti._library()
        value = ctypes.c_uint64()
        reference = ctypes.byref(value)
        ask = self._library.cuptiGetGraphNodeId
        pointer = ctypes.c_void_p

        def node_id(node: int) -> int:
            if ask(pointer(node), reference) != 0:
                raise RuntimeError("cuptiGetGraphNodeId failed")
            return value.value

        self.handler = PeerHandler(path, node_id)
        on_created = self.handler.on_created
        self.errors: list[BaseException] = []

        def callback(_user: Any, domain: int, callback_id: int, data: int) -> None:
            try:
                on_created(domain, callback_id, data)
            except BaseException as error:  # noqa: BLE001 - must not reach CUPTI's C code; raised by `recording`
                self.errors.append(error)

        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        self._callback = kind(callback)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Open before the capture begins, close before its graph is instantiated or after."""
        subscriber = ctypes.c_void_p()
        self.handler.clear()
        self._call("cuptiSubscribe", ctypes.byref(subscriber), self._callback, None)
        try:
            self._call("cuptiEnableCallback", 1, subscriber, _DOMAIN_RESOURCE, _GRAPHNODE_CREATED)
            yield
        finally:
            self._library.cuptiEnableCallback(0, subscriber, _DOMAIN_RESOURCE, _GRAPHNODE_CREATED)
            self._call("cuptiUnsubscribe", subscriber)
            self._call("cuptiFinalize")
        if self.errors:
            raise RuntimeError(f"the handler failed at {len(self.errors)} nodes") from self.errors[0]

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} answered {result}, expected 0")
