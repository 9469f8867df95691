"""Noticing calls of a method of one graph object, where nothing else tells that they were made."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class CallWatch:
    """Counts the calls of a method: lies over it, as an attribute of the graph object.

    The driver gives a new graph or executable graph the address of one just destroyed, so addresses alone
    cannot tell them apart. What is not seen: a method called on the class, ``torch.cuda.CUDAGraph.reset(g)``.

    Attributes:
        count: changes with each call, before it begins and after it ended.
    """

    def __init__(self, graph: Any, name: str, covered: Callable[..., Any] | None) -> None:
        self.count = 0
        self._graph = weakref.ref(graph)
        self._name = name
        self._covered = covered
        self._told: list[Callable[[], None]] = []
        self._told_afterwards: list[Callable[[], None]] = []

    @classmethod
    def on(cls, graph: Any, name: str) -> CallWatch:
        """The watch that lies over method ``name`` of ``graph``; put there if there is none."""
        found = vars(graph).get(name)
        if not isinstance(found, CallWatch):
            found = cls(graph, name, found)
            setattr(graph, name, found)
        return found

    def tell(self, listener: Callable[[], None], *, afterwards: bool = False) -> None:
        """Have ``listener`` called before each call (or before and after); it lives as long as the graph."""
        self._told.append(listener)
        if afterwards:
            self._told_afterwards.append(listener)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        try:
            for listener in self._told:
                listener()
            if self._covered is not None:
                return self._covered(*args, **kwargs)
            graph = self._graph()
            # Whoever kept the method does not keep the graph.
            return None if graph is None else getattr(type(graph), self._name)(graph, *args, **kwargs)
        finally:
            self.count += 1
            for listener in self._told_afterwards:
                listener()
