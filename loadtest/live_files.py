"""What a live comparison leaves in its directory, and how one that was killed goes on from it.

    DIR/compare.json              one `Comparison` (its fields: `live_schema`)
    DIR/records-<run>.jsonl       one `RequestRecord` a line, warm-up included, for each cell; `run` is
                                  <policy>-<pass>-<load>, times count from the start of that run
    DIR/summary.txt, compare.png  the same for people
    DIR/borrowed.json             while the router's policy is ours: what to put back. It is still there
                                  when the comparison was killed or the router could not be reached

The law of this file: `compare.json` is replaced as a whole, after the records of a cell are on disk.
So a cell is in it or it is not, whenever the comparison is killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec

from loadtest.live_schema import Change, Comparison, LiveError, decode_comparison
from loadtest.on_disk import locked, replace_document, replace_file
from loadtest.record import RecordError, RequestRecord, encode_records, read_records

COMPARISON: Final = "compare.json"
SUMMARY: Final = "summary.txt"
PICTURE: Final = "compare.png"
BORROWED: Final = "borrowed.json"


class Loan(msgspec.Struct, frozen=True):
    """A router's policy that has to be put back."""

    admin: str  # its admin listener
    before: Change


class LiveDirectory:
    """The files of one comparison."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path) -> Iterator[Self]:
        """The directory, for one comparison at a time. Raises LiveError."""
        with locked(path, "comparison", LiveError):
            yield cls(path)

    def read(self) -> Comparison | None:
        """What is there, its cells as far as their records are; None when nothing is."""
        path = self.path / COMPARISON
        try:
            found = decode_comparison(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LiveError(f"{path} cannot be read: {error.strerror}") from error
        whole = tuple(cell for cell in found.cells if len(self.records(cell.run)) == cell.records)
        return msgspec.structs.replace(found, cells=whole)

    def records(self, run: str) -> list[RequestRecord]:
        """The records of a run; none when they cannot be read."""
        try:
            return list(read_records(self._records(run)))
        except (OSError, RecordError):
            return []

    def add(self, run: str, records: Sequence[RequestRecord]) -> None:
        """Keep the records of a run."""
        replace_file(self._records(run), encode_records(records))

    def write(self, comparison: Comparison, summary: str) -> None:
        """Replace what is said of the whole."""
        replace_document(self.path / COMPARISON, comparison)
        replace_file(self.path / SUMMARY, summary.encode())

    def lend(self, loan: Loan) -> None:
        """Note what has to be put back, before anything is changed."""
        replace_file(self.path / BORROWED, msgspec.json.encode(loan))

    def owed(self, admin: str, since: float) -> Change | None:
        """What a comparison that was killed did not put back at this router.

        A router that started after that, at `since` in Unix seconds, decides as its start says.
        """
        path = self.path / BORROWED
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Loan)
            lent = path.stat().st_mtime
        except (OSError, msgspec.MsgspecError):
            return None
        return found.before if found.admin == admin and lent > since else None

    def returned(self) -> None:
        """It is put back."""
        (self.path / BORROWED).unlink(missing_ok=True)

    def _records(self, run: str) -> Path:
        return self.path / f"records-{run}.jsonl"
