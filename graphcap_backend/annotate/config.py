"""How one capture records annotations: ``annotation_config`` of ``graph``, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Backend = Literal["auto", "cupti", "edge_walk"]
KeyBy = Literal["exec", "source", "auto"]

_BACKENDS: Final[tuple[Backend, ...]] = ("auto", "cupti", "edge_walk")
_KEYS: Final[tuple[KeyBy, ...]] = ("exec", "source", "auto")
_OPTIONS: Final = ("backend", "key_by", "record_py_stacks", "py_stack_filter_paths")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotationConfig:
    """Options of one recording."""

    backend: Backend = "auto"
    """How nodes are found: CUPTI callbacks, a walk along the capture frontier, or whichever
    is free."""
    key_by: KeyBy = "exec"
    """Which graph's id the registry's keys carry."""
    record_py_stacks: bool = False
    py_stack_filter_paths: tuple[str, ...] | None = None
    """Directories whose frames are left out. None: the default ones; empty: nothing."""
    best_effort: bool = False
    """Stacks are wanted but never an error: a busy or missing CUPTI degrades. Not an option
    of ``annotation_config``; the torch.compile backend sets it."""

    @classmethod
    def parse(cls, config: Mapping[str, Any] | None) -> AnnotationConfig:
        """Check ``annotation_config`` as ``graph`` takes it.

        Raises:
            ValueError: an unknown key or value, or options that exclude each other.
            TypeError: a value of the wrong type.
        """
        if config is None:
            return cls()
        if not isinstance(config, Mapping):
            raise TypeError(f"annotation_config must be a dict or None, got {config!r}")
        unknown = sorted(str(key) for key in config if key not in _OPTIONS)
        if unknown:
            raise ValueError(f"annotation_config has unknown keys {unknown}; valid keys are {list(_OPTIONS)}")
        backend = config.get("backend", "auto")
        if backend not in _BACKENDS:
            raise ValueError(_choice("backend", backend, _BACKENDS))
        key_by = config.get("key_by", "exec")
        if key_by not in _KEYS:
            raise ValueError(_choice("key_by", key_by, _KEYS))
        stacks = config.get("record_py_stacks", False)
        if not isinstance(stacks, bool):
            raise TypeError(f'annotation_config["record_py_stacks"] must be True or False, got {stacks!r}')
        if stacks and backend == "edge_walk":
            raise ValueError(
                'annotation_config["record_py_stacks"]=True needs CUPTI node callbacks, which '
                'backend="edge_walk" rules out; use backend="auto" or "cupti"'
            )
        return cls(
            backend=backend,
            key_by=key_by,
            record_py_stacks=stacks,
            py_stack_filter_paths=_filter_paths(config.get("py_stack_filter_paths")),
        )


def _choice(key: str, value: object, valid: tuple[str, ...]) -> str:
    return f'annotation_config["{key}"] is {value!r}; valid values are {list(valid)}'


def _filter_paths(paths: object) -> tuple[str, ...] | None:
    if paths is None:
        return None
    expected = 'annotation_config["py_stack_filter_paths"] must be a list or tuple of str, or None'
    if not isinstance(paths, (list, tuple)):
        raise TypeError(f"{expected}, got {paths!r}")
    for path in paths:
        if not isinstance(path, str):
            raise TypeError(f"{expected}, got an element {path!r}")
        if not path or "\0" in path:
            raise ValueError(f"{expected}; {path!r} is not a path")
    return tuple(os.fspath(path) for path in paths)
