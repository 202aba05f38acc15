"""The one table of our own errors."""

from __future__ import annotations

import http
import json
import re
from pathlib import Path

import pytest

from router import errors
from router.errors import ErrorAnswer

ROWS = {name: row for name, row in vars(errors).items() if isinstance(row, ErrorAnswer)}
rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def test_which_status_each_error_has() -> None:
    """A client can tell by the status whose fault it is and whether to try again."""
    assert {name: row.status for name, row in ROWS.items()} == {
        "BAD_REQUEST": 400, "BAD_BODY": 400, "STATEFUL": 400, "BAD_PIN": 400,
        "UNAUTHORIZED": 401, "CROSS_SITE": 403, "NO_ADMIN_KEY": 403, "FOREIGN_HOST": 421,
        "NOT_FOUND": 404, "STORED": 404,
        "MODEL_NOT_FOUND": 404, "METHOD_NOT_ALLOWED": 405,
        "REQUEST_TIMEOUT": 408, "BODY_TOO_LARGE": 413, "URL_TOO_LONG": 414,
        "EXPECTATION_FAILED": 417, "INVALID_VALUE": 422, "HEADERS_TOO_LARGE": 431, "BAD_VERSION": 505,
        "BAD_TRANSFER_CODING": 501, "QUEUE_FULL": 429, "QUEUE_TIMEOUT": 429, "OVERLOADED": 503, "NO_FILES": 503,
        "TOO_MANY_CONNECTIONS": 503, "DRAINING": 503, "NO_BACKEND": 503,
        "NOT_READY": 503, "TOO_MANY_LISTENERS": 503, "BAD_ANSWER": 502,
        "PINNED_UNAVAILABLE": 503, "CONNECT_FAILED": 502, "CONNECT_TIMEOUT": 502,
        "BACKEND_LOST": 502, "BACKEND_PROTOCOL": 502, "FIRST_BYTE_TIMEOUT": 504,
        "IDLE_TIMEOUT": 504, "DRAIN_LIMIT": 503, "INTERNAL": 500,
    }  # fmt: skip


@rows
def test_the_body_has_openais_shape(row: ErrorAnswer) -> None:
    """The body is {"error": {message, type, param, code}} and no more."""
    assert json.loads(row.body) == {
        "error": {"message": row.message, "type": row.type, "param": row.param, "code": row.code}
    }
    assert row.message
    assert re.fullmatch("[a-z_]+", row.code)


@rows
def test_what_may_be_tried_again_says_when(row: ErrorAnswer) -> None:
    """Each 429 and 503 has a Retry-After of at least a second, and nothing else has one."""
    if row.status in {429, 503}:
        assert row.retry_after is not None
        assert row.retry_after >= 1
    else:
        assert row.retry_after is None


@rows
def test_the_type_follows_the_status(row: ErrorAnswer) -> None:
    """What the client did is invalid_request_error, a limit rate_limit_error, the rest ours."""
    if row.status == 429:
        expected = "rate_limit_error"
    elif row.status < 500 or row.status in {501, 505}:
        expected = "invalid_request_error"
    else:
        expected = "server_error"
    assert row.type == expected


@rows
def test_no_text_names_an_address(row: ErrorAnswer) -> None:
    """No error tells a client where a backend is."""
    assert not re.search(
        r"https?:|\d+\.\d+\.\d+|localhost|:\d{2,}", row.message.replace("HTTP/1.", "")
    )


def test_a_code_has_one_status_and_type() -> None:
    """A program that goes by the code alone is not misled."""
    seen: dict[str, tuple[int, str]] = {}
    for row in ROWS.values():
        assert seen.setdefault(row.code, (row.status, row.type)) == (row.status, row.type)


def test_every_error_is_in_the_table() -> None:
    """No other module makes an error of its own: the table is the only place for them."""
    elsewhere = {
        path.name for path in Path(errors.__file__).parent.glob("*.py")
        if re.search(r"\bErrorAnswer\(", path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert elsewhere == {"errors.py"}


def test_a_message_of_its_own_keeps_the_row() -> None:
    """A text that fits the case changes the text, and the parameter, and nothing else."""
    row = errors.QUEUE_FULL.with_message("full of it", "n")
    assert (row.message, row.param) == ("full of it", "n")
    assert (row.status, row.code, row.retry_after) == (429, "queue_full", 1)
    assert errors.QUEUE_FULL.message != "full of it"


@pytest.mark.parametrize(
    "text", ["two\nlines", 'a "quote"', "\r\ndata: x", "ü \u2028 \0", "\ud7ff"]
)
def test_a_text_cannot_break_out(text: str) -> None:
    """Whatever the text, the body is JSON, and the event is one event on one line."""
    row = errors.BACKEND_LOST.with_message(text)
    assert json.loads(row.body)["error"]["message"] == text
    assert row.event == b"data: " + row.body + b"\n\n"
    assert row.event.count(b"\n") == 2
    assert b"\r" not in row.event


@pytest.mark.parametrize("status", [*http.HTTPStatus])
def test_the_phrase_of_a_known_status(status: http.HTTPStatus) -> None:
    """A registered status has its registered phrase."""
    assert errors.phrase(status) == status.phrase.encode()


@pytest.mark.parametrize("status", [299, 529, 599, 999])
def test_an_unknown_status_has_no_phrase(status: int) -> None:
    """A status that nobody registered gets an empty phrase, which is valid."""
    assert errors.phrase(status) == b""
