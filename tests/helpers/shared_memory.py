"""Have graphs of any size share memory as those do that need much."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from graphcap_backend.capture import arena, capturer


@contextlib.contextmanager
def shared_from(*, num_bytes: int, packed_from: int | None = None) -> Iterator[None]:
    """Graphs share the memory of outputs if one of their function needs ``num_bytes``.

    The pool is packed anew for ``packed_from`` unused bytes; None leaves that as it is.
    """
    loose = arena._LOOSE_BYTES if packed_from is None else packed_from
    with patch.object(capturer, "_MUCH_MEMORY_BYTES", num_bytes), patch.object(arena, "_LOOSE_BYTES", loose):
        yield
