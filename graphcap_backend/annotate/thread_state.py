"""Objects in autograd's thread-local state, which a backward takes along to its worker threads."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch

_has, _get = torch._C._is_key_in_tls, torch._C._get_obj_in_tls


def put(key: str, value: object) -> None:
    """Have ``value`` seen under ``key`` on this thread, and in backwards that start here from now on."""
    if not _takes_a_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


def get(key: str) -> Any:
    """What is there under ``key``, or None."""
    return _get(key) if _has(key) else None


def remove(key: str) -> None:
    """Undo ``put`` on this thread."""
    if hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(key)
    else:  # torch before 2.13
        put(key, None)


@cache
def _takes_a_reference() -> bool:
    """Whether torch counts its reference to what it stashes.

    Seen on torch 2.11: it drops a reference that it never took when the entry is replaced, and the object
    is freed under its other holders.
    """
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("graphcap probe", probe)
    takes = sys.getrefcount(probe) > before
    if not takes:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    remove_probe = getattr(torch._C, "_remove_obj_from_tls", None)
    if remove_probe is not None:
        remove_probe("graphcap probe")
    return takes
