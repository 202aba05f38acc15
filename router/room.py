"""Memory for one large request body whose length is known, filled as the bytes come.

Its pages are the system's: taken as they are filled, so that a length that is only announced costs
nothing, and given back at once. Pieces that are joined at the end need the memory twice for a while, and 5
to 10 ms for 10 MB, in which nothing else is relayed. It may not be used for small bodies: a
mapping costs more than they do.
"""

from __future__ import annotations

import contextlib
import mmap


class Room:
    """Room for `length` bytes. Raises OSError where the system gives none."""

    __slots__ = ("_pages",)

    def __init__(self, length: int) -> None:
        self._pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Otherwise the first byte may take 2 MiB, while one byte is counted.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel that knows no huge pages
                self._pages.madvise(mmap.MADV_NOHUGEPAGE)

    def write(self, piece: bytes) -> None:
        """Add the next bytes. Raises ValueError beyond the length."""
        self._pages.write(piece)

    def whole(self) -> memoryview:
        """All of it, without a copy."""
        return memoryview(self._pages)
