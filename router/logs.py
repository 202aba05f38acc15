"""Where every line of the log goes: standard error, one JSON object a line, never blocking us.

A log whose reader is stuck must not stop the relay. So lines are handed through a bounded queue to
one thread, which alone touches the stream; what does not fit is dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, MutableMapping
from typing import Any, Final

import structlog

QUEUE_BATCHES: Final = 256
QUEUE_BYTES: Final = 32 * 1024 * 1024  # that may wait: lines are short, until some are not
CLOSE_SECONDS: Final = 2.0
# Libraries that would log a line, with an address in it, for every request they make.
CHATTY: Final = ("httpx", "httpcore")
UVICORN: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


def write_stderr(data: bytes) -> None:
    """Write all of it to standard error. Raises OSError when nobody reads there any more."""
    view = memoryview(data)
    while view:
        view = view[os.write(2, view) :]


class LineWriter:
    """The one thread that writes. `put` is for any thread, and never waits."""

    def __init__(
        self,
        write: Callable[[bytes], object] = write_stderr,
        *,
        on_drop: Callable[[int], None] | None = None,
        batches: int = QUEUE_BATCHES,
        most_bytes: int = QUEUE_BYTES,
    ) -> None:
        """`on_drop` is told how many lines were lost; `batches` and `most_bytes` bound what waits."""
        self._write = write
        self._on_drop = on_drop
        self._queue: queue.Queue[tuple[bytes, int] | None] = queue.Queue(batches)
        self._most_bytes = most_bytes
        self.waiting = 0  # bytes
        self._lock = threading.Lock()  # of `waiting` alone: it is held for a sum
        self._thread: threading.Thread | None = None
        self._closed = False
        self.dropped = 0

    def put(self, data: bytes, lines: int = 1) -> None:
        """Hand over whole lines; the thread starts with the first ones."""
        if self._closed:
            self._drop(lines)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
            self._thread.start()
        if not self._take_room(len(data)):
            self._drop(lines)
            return
        try:
            self._queue.put_nowait((data, lines))
        except queue.Full:
            self._take_room(-len(data))
            self._drop(lines)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, for at most so long; what comes later is dropped."""
        self._closed = True
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            data, lines = item
            try:
                self._write(data)
            except (OSError, ValueError):  # a closed pipe; a closed file object
                self._drop(lines)
            self._take_room(-len(data))

    def _take_room(self, size: int) -> bool:
        """Take room for so many bytes, if there is; less than none gives it back."""
        with self._lock:
            if self.waiting + size > self._most_bytes:
                return False
            self.waiting += size
            return True

    def _drop(self, lines: int) -> None:
        self.dropped += lines
        if self._on_drop is not None:
            self._on_drop(lines)


class WriterHandler(logging.Handler):
    """Gives the lines of the standard library's logging to the writer."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Format one record and hand it over."""
        try:
            self._writer.put(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:  # noqa: BLE001  (logging's own rule: a bad record stops nothing)
            self.handleError(record)


def configure_logging(level: str = "info", writer: LineWriter | None = None) -> None:
    """Make every log line of this process one JSON object on standard error.

    That includes uvicorn's (start it with `log_config=None`), warnings and structlog's. `level` is
    a name of the standard library in any case; an unknown one raises ValueError. Without a
    `writer`, lines are written where they arise, which is right for short commands.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        msg = f"unknown log level {level!r}"
        raise ValueError(msg)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _without_colour,
    ]
    structlog.configure(
        processors=[
            *shared[:3],
            *shared[4:],
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr) if writer is None else WriterHandler(writer)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _in_order,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(number)
    for name in UVICORN:
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
        # Two listeners would say each step of their own twice; ours says what matters once.
        logger.setLevel(max(number, logging.WARNING) if number > logging.DEBUG else number)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    logging.captureWarnings(True)


def _in_order(_: object, __: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """The fields that every line has come first, as in the line of a request."""
    first = {name: event.pop(name, None) for name in ("timestamp", "level", "event")}
    return first | dict(event)


def _without_colour(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
    """Take out uvicorn's second, coloured copy of its message."""
    event.pop("color_message", None)
    return event
