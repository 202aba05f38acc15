"""What a sweep leaves in its directory, and how a sweep that was killed goes on from it.

    DIR/records-<role>-<pass>.jsonl   one `RequestRecord` a line, warm-up included. `run` is
                                      `<role>-<pass>-<level>` (`...-r<rate>` in an open loop),
                                      `level` the level; times count from the start of that run
    DIR/sweep.json                    one `Sweep`: conditions, points, levels, notices
                                      (its fields: `sweep_schema`)
    DIR/summary.txt                   the same for people (see `sweep_view`)

The law of this file: `sweep.json` is replaced as a whole, after the records of a level are on disk.
So a level is in it or it is not, whenever the sweep is killed. On the next start records of levels
that are not in it are dropped, and a level whose records are not all there is measured again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from loadtest.on_disk import replace_document, replace_file
from loadtest.record import RequestRecord, encode_records
from loadtest.sweep_schema import Point, Sweep, SweepError, decode_sweep
from router.load import Role

SWEEP: Final = "sweep.json"
SUMMARY: Final = "summary.txt"


class SweepDirectory:
    """The files of one sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records_path(self, role: Role, number: int) -> Path:
        """Where the records of a pass are."""
        return self.path / f"records-{role.value}-{number}.jsonl"

    def read(self) -> Sweep | None:
        """What is there; None when nothing is. Raises SweepError."""
        path = self.path / SWEEP
        try:
            return decode_sweep(path.read_bytes(), str(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SweepError(f"{path} cannot be read: {error.strerror}") from error

    def records(self, point: Point) -> list[RequestRecord]:
        """The records of one point, as far as they are there."""
        return self._lines(self.records_path(point.role, point.number)).get(point.run, [])

    def mend(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """The points whose records are all there; what else the records' files hold is dropped.

        Also what a kill left behind: half a line, a level that was not finished.
        """
        kept: dict[Path, list[RequestRecord]] = {}
        whole: list[Point] = []
        for point in points:
            path = self.records_path(point.role, point.number)
            records = self.records(point)
            if len(records) == point.records:
                whole.append(point)
                kept.setdefault(path, []).extend(records)
        for path in self.path.glob("records-*.jsonl"):
            if path in kept:
                replace_file(path, encode_records(kept[path]))
            else:
                path.unlink()  # of a pass of which nothing was finished
        return tuple(whole)

    def add(self, role: Role, number: int, records: Sequence[RequestRecord]) -> None:
        """Put records behind those that are there, on the disk before this returns."""
        with self.records_path(role, number).open("ab") as file:
            file.write(encode_records(records))
            file.flush()
            os.fsync(file.fileno())

    def write(self, sweep: Sweep, summary: str) -> None:
        """Replace what is said of the whole."""
        replace_document(self.path / SWEEP, sweep)
        replace_file(self.path / SUMMARY, summary.encode())

    @staticmethod
    def _lines(path: Path) -> dict[str, list[RequestRecord]]:
        """By run; a line that is no record (a kill cut it) is left out."""
        found: dict[str, list[RequestRecord]] = {}
        decoder = msgspec.json.Decoder(RequestRecord)
        data = path.read_bytes() if path.exists() else b""
        for line in data.splitlines():
            try:
                record = decoder.decode(line)
            except msgspec.MsgspecError:
                continue
            found.setdefault(record.run, []).append(record)
        return found
