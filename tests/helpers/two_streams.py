"""A host device that has streams by name, and tells who waited for whom."""

from __future__ import annotations

from graphcap_backend.capture.device import HostDevice


class StreamedHost(HostDevice):
    """The host, as if work were given to the stream ``now``."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.waits: list[tuple[int, int]] = []
        """(stream that waits, stream waited for)"""

    def current_stream(self) -> int:  # type: ignore[override]
        return self.now

    def wait_for_stream(self, stream: int) -> None:
        self.waits.append((self.now, stream))
