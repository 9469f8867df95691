"""Memory pools of captures: tokens and what is accepted in their place."""

from __future__ import annotations

import itertools
from typing import Any

PoolHandle = tuple[int, int]

_host_handles = itertools.count(1)  # CPU-only builds have no counter of their own to ask


def graph_pool_handle() -> PoolHandle:
    """A new pool token to pass as ``pool`` of several captures, which then may share memory.

    Also works where there is no CUDA, for captures into :class:`HostGraph`.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return (0, next(_host_handles))
    handle: PoolHandle = torch.cuda.graph_pool_handle()
    return handle


def pool_id(pool: Any) -> PoolHandle | None:
    """The token of whatever was given as ``pool``.

    Raises:
        TypeError: ``pool`` is none of the things accepted.
    """
    if pool is None:
        return None
    if _is_mem_pool(pool):
        identity: PoolHandle = pool.id
        return identity
    if (
        isinstance(pool, tuple)
        and len(pool) == 2
        and all(isinstance(part, int) and not isinstance(part, bool) for part in pool)
    ):
        return pool
    hint = "; call g.pool() on it after its capture" if hasattr(pool, "capture_begin") else ""
    raise TypeError(
        "pool must be a token of graph_pool_handle() or of a captured graph's pool(), a torch.cuda.MemPool, "
        f"or None; found {type(pool).__name__}{hint}"
    )


def _is_mem_pool(pool: Any) -> bool:
    import torch

    return isinstance(pool, torch.cuda.MemPool)
