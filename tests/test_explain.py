"""The ring of decisions, the line per request, and the program's log."""

from __future__ import annotations

import io
import json
import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from router.access_log import FLUSH_LINES, AccessLog
from router.explain import DecisionLog, DecisionView, EventView, safe_id
from router.load import PolicyMemory, Role
from router.logs import LineWriter, configure_logging
from router.metrics import Finished, Outcome, Retry
from router.policy import Decision, Reason
from tests.test_metrics import finished

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE


def decision(
    backend: Role | None = SPEC,
    reason: Reason = Reason.BELOW_THRESHOLD,
    frontier: float | None = 8.0,
) -> Decision:
    return Decision(backend, reason, 3, 1, frontier, PolicyMemory(), frontier and frontier + 1)


def make_log(size: int = 1000) -> DecisionLog:
    return DecisionLog(size=size, clock=lambda: 100.0, wall=lambda: 5000.0)


class Sink:
    """Takes what a writer writes; can be stuck, or closed."""

    def __init__(self) -> None:
        self.data = b""
        self.free = threading.Event()
        self.free.set()
        self.closed = False

    def __call__(self, data: bytes) -> None:
        self.free.wait(10)
        if self.closed:
            raise BrokenPipeError
        self.data += data

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.data.split(b"\n")[:-1]]


@pytest.fixture
def sink() -> Sink:
    return Sink()


# --------------------------------------------------------------------------- decisions


def test_a_decision_is_shown_with_all_its_numbers() -> None:
    """An entry says when, which, why, at what load and line, and how it ended."""
    log = make_log()
    entry = log.add(98.5, "r-1", "chat_completions", decision())
    entry.finish(Outcome.OK, 200, 99.75)
    assert log.view() == [
        DecisionView(
            time=4998.5, kind="decision", request_id="r-1", route="chat_completions",
            backend=SPEC, reason=Reason.BELOW_THRESHOLD, n=3, m=1, frontier=8.0,
            threshold=9.0, replay=False,
            outcome=Outcome.OK, status=200, duration=1.25,
        )
    ]  # fmt: skip


def test_a_running_request_has_no_outcome_yet() -> None:
    """A decision is seen at once; its outcome, status and duration come later."""
    log = make_log()
    log.add(98.5, "r-1", "generate", decision(), replay=True)
    (shown,) = log.view()
    assert isinstance(shown, DecisionView)
    assert (shown.outcome, shown.status, shown.duration, shown.replay) == (None, None, None, True)


def test_the_ring_keeps_the_last_ones_newest_first() -> None:
    """The oldest entry leaves when the ring is full."""
    log = make_log(size=3)
    for number in range(5):
        log.add(float(number), f"r-{number}", "generate", decision())
    assert len(log) == 3
    assert [d.request_id for d in log.view() if isinstance(d, DecisionView)] == [
        "r-4",
        "r-3",
        "r-2",
    ]
    assert len(log.view(limit=2)) == 2


def test_filters_choose_by_reason_and_backend() -> None:
    """A filter shows only decisions that match it, and no events."""
    log = make_log()
    log.add(1.0, "a", "generate", decision())
    log.add(2.0, "b", "generate", decision(BASE, Reason.BAND))
    log.add(3.0, "c", "generate", decision(BASE, Reason.DWELL))
    log.event(4.0, "drain", "baseline")
    shown = log.view(backend=BASE)
    assert [d.request_id for d in shown if isinstance(d, DecisionView)] == ["c", "b"]
    assert len(shown) == 2
    assert len(log.view(backend=BASE, reason=Reason.BAND)) == 1
    assert log.view(reason=Reason.NEVER) == []
    assert log.view()[0] == EventView(4904.0, "event", "drain", "baseline")


def test_a_rules_numbers_are_shown() -> None:
    """A rule that decides by curves shows the load that it saw and the gain whose sign decided."""
    log = make_log()
    made = Decision(SPEC, Reason.FORECAST, 3, 1, None, PolicyMemory(), None, 812.5, -1.23456)
    log.add(1.0, "a", "generate", made)
    (shown,) = log.view()
    assert isinstance(shown, DecisionView)
    assert (shown.frontier, shown.offered, shown.gain) == (None, 812.5, -1.2346)


def test_an_infinite_threshold_is_a_word() -> None:
    """JSON has no infinity, so a line that is never reached is shown as the word."""
    log = make_log()
    log.add(1.0, "a", "generate", decision(frontier=math.inf))
    (shown,) = log.view()
    assert isinstance(shown, DecisionView)
    assert (shown.frontier, shown.threshold) == ("infinity", "infinity")


# --------------------------------------------------------------------------- one line per request


def written(sink: Sink, *finished_ones: Finished) -> list[dict[str, object]]:
    writer = LineWriter(sink)
    access = AccessLog(writer, wall=lambda: 1_800_000_000.25, clock=lambda: 12.0)
    for done in finished_ones:
        access.add(done)
    access.flush()
    writer.close()
    return sink.lines


def test_a_line_says_what_happened(sink: Sink) -> None:
    """The line of a request carries time, ids, decision, durations in ms, sizes and tokens."""
    done = finished(replay=Retry.CONNECT, queue_wait=0.00001)
    assert written(sink, done) == [
        {
            "timestamp": "2027-01-15T08:00:00.250Z", "level": "info", "event": "request",
            "request_id": "r-1", "route": "chat_completions", "backend": "speculative",
            "reason": "below_threshold", "n": 3, "m": 1, "threshold": 8.0, "status": 200,
            "outcome": "ok", "stream": True, "duration_ms": 2000.0, "first_byte_ms": 250.0,
            "overhead_ms": 0.03, "queue_wait_ms": 0.01, "bytes_in": 300, "bytes_out": 5000,
            "chunks": 20, "prompt_tokens": 12, "output_tokens": 44, "replay": "replay_connect",
            "error": None,
        }
    ]  # fmt: skip


def test_a_fault_is_a_warning(sink: Sink) -> None:
    """A backend's fault is logged as a warning; a client's error or leaving is not."""
    outcomes = (Outcome.BACKEND_LOST, Outcome.CLIENT_ERROR, Outcome.CLIENT_GONE, Outcome.TIMEOUT)
    lines = written(sink, *(finished(outcome=outcome) for outcome in outcomes))
    assert [line["level"] for line in lines] == ["warning", "info", "info", "warning"]


def test_what_did_not_happen_is_null(sink: Sink) -> None:
    """A request that reached no backend has null times, and an infinite threshold is a word."""
    done = finished(backend=None, reason=None, sent_at=None, first_byte_at=None, threshold=math.inf)
    (line,) = written(sink, done)
    assert line["backend"] is None
    assert line["overhead_ms"] is None
    assert line["first_byte_ms"] is None
    assert line["threshold"] == "infinity"


@given(st.text(st.characters(), max_size=300))
def test_no_request_id_can_make_a_second_line(request_id: str) -> None:
    """Newlines, quotes, control characters and surrogates in an id stay inside one JSON string."""
    sink = Sink()
    (line,) = written(sink, finished(request_id=request_id))
    assert line["event"] == "request"
    assert line["request_id"] == safe_id(request_id)
    assert sink.data.isascii()
    assert sink.data.count(b"\n") == 1


def test_a_long_id_is_cut() -> None:
    """128 characters of a request id are kept."""
    assert safe_id("x" * 1000) == "x" * 128
    assert safe_id("é\udc80") == "\\xe9\\udc80"


def test_lines_leave_in_batches(sink: Sink) -> None:
    """Nothing is written before the batch is full, and then all of it is."""
    writer = LineWriter(sink)
    access = AccessLog(writer)
    for _ in range(FLUSH_LINES - 1):
        access.add(finished())
    assert sink.data == b""
    access.add(finished())
    writer.close()
    assert len(sink.lines) == FLUSH_LINES


def test_a_timer_writes_what_waits(sink: Sink) -> None:
    """The first line of a batch arms one timer, and the timer flushes."""
    armed: list[Callable[[], None]] = []
    writer = LineWriter(sink)
    access = AccessLog(writer, call_later=lambda _, call: armed.append(call))
    access.add(finished())
    access.add(finished())
    assert len(armed) == 1
    armed[0]()
    access.add(finished())
    assert len(armed) == 2
    writer.close()
    assert len(sink.lines) == 2


def test_a_log_that_is_off_writes_nothing(sink: Sink) -> None:
    """Without an access log nothing is encoded."""
    writer = LineWriter(sink)
    access = AccessLog(writer, enabled=False)
    access.add(finished())
    access.flush()
    writer.close()
    assert sink.data == b""


# --------------------------------------------------------------------------- the writer


def test_a_stuck_reader_costs_lines_and_no_time(sink: Sink) -> None:
    """What does not fit in the queue is dropped and counted; nobody waits."""
    lost: list[int] = []
    sink.free.clear()
    writer = LineWriter(sink, on_drop=lost.append, batches=2)
    for _ in range(10):
        writer.put(b"{}\n{}\n", 2)
    sink.free.set()
    writer.close()
    assert writer.dropped == sum(lost)
    assert len(sink.lines) + writer.dropped == 20
    assert writer.dropped >= 14


def test_what_waits_is_bounded_in_bytes(sink: Sink) -> None:
    """Long lines fill the queue as well as many do; room that was written out is free again."""
    sink.free.clear()
    writer = LineWriter(sink, most_bytes=100)
    for _ in range(10):
        writer.put(b'"%b"\n' % (b"x" * 37))
    assert writer.dropped == 8
    sink.free.set()
    writer.close()
    assert len(sink.lines) == 2
    again = LineWriter(sink, most_bytes=100)
    for count in range(1, 6):
        again.put(b'"%b"\n' % (b"y" * 87))
        while len(sink.lines) < 2 + count or again.waiting:
            time.sleep(0.001)
    again.close()
    assert again.dropped == 0


def test_a_closed_pipe_costs_lines_only(sink: Sink) -> None:
    """A reader that is gone does not end the thread: each batch is dropped and counted."""
    sink.closed = True
    writer = LineWriter(sink)
    writer.put(b"{}\n")
    writer.put(b"{}\n")
    writer.close()
    assert writer.dropped == 2


def test_close_does_not_wait_for_ever(sink: Sink) -> None:
    """Closing gives up on a stuck reader, and what comes later is dropped."""
    sink.free.clear()
    writer = LineWriter(sink, batches=1)
    writer.put(b"{}\n")
    writer.close(0.01)
    writer.put(b"{}\n")
    assert writer.dropped == 1
    sink.free.set()


def test_a_writer_that_wrote_nothing_closes_at_once() -> None:
    """No line, no thread."""
    before = threading.active_count()
    LineWriter().close()
    assert threading.active_count() == before


# --------------------------------------------------------------------------- the program's log


@pytest.fixture
def logging_kept() -> Iterator[None]:
    root = logging.getLogger()
    kept = (root.handlers[:], root.level)
    names = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "httpx", "httpcore")
    states = {n: (logging.getLogger(n).handlers[:], logging.getLogger(n).level) for n in names}
    yield
    root.handlers, root.level = kept
    for name, (handlers, level) in states.items():
        logging.getLogger(name).handlers, logging.getLogger(name).level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()


@pytest.mark.usefixtures("logging_kept")
def test_every_line_of_the_program_is_json(sink: Sink) -> None:
    """The standard library's, uvicorn's and structlog's lines have one shape, exceptions too."""
    writer = LineWriter(sink)
    configure_logging("info", writer)
    logging.getLogger("crossover").info("up\n%s", "now", extra={"backend": "baseline"})
    logging.getLogger("uvicorn.error").warning("hm", extra={"color_message": "red"})
    structlog.get_logger("crossover").warning("changed", policy="frontier")
    logging.getLogger("crossover").debug("not shown")
    logging.getLogger("httpx").info("GET http://10.0.0.1:30000/health")
    nothing: dict[str, str] = {}
    try:
        nothing["gone"]
    except KeyError:
        logging.getLogger("crossover").exception("failed")
    writer.close()
    first, second, third, fourth = sink.lines
    assert list(first) == ["timestamp", "level", "event", "logger", "backend"]
    assert (first["event"], first["level"], first["backend"]) == ("up\nnow", "info", "baseline")
    assert (second["event"], second["logger"]) == ("hm", "uvicorn.error")
    assert "color_message" not in second
    assert (third["event"], third["policy"]) == ("changed", "frontier")
    assert "KeyError: 'gone'" in str(fourth["exception"])
    assert str(fourth["timestamp"]).endswith("Z")


@pytest.mark.usefixtures("logging_kept")
def test_warnings_are_lines_too(sink: Sink) -> None:
    """A Python warning becomes a line instead of text on standard error."""
    writer = LineWriter(sink)
    with warnings.catch_warnings():
        configure_logging("warning", writer)
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    writer.close()
    assert "old" in str(sink.lines[0]["event"])


@pytest.mark.usefixtures("logging_kept")
def test_without_a_writer_lines_go_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short command needs no thread."""
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    configure_logging("INFO")
    logging.getLogger("crossover").info("hello")
    assert json.loads(stderr.getvalue())["event"] == "hello"


def test_an_unknown_level_is_refused() -> None:
    """A level that logging does not know is a ValueError that names it."""
    with pytest.raises(ValueError, match="loud"):
        configure_logging("loud")
