"""What must hold of every story when all is quiet: bytes, replays, counts.

`strict` says that neither the network nor a shutdown did any harm, so that nothing may be broken
that the backend did not break.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, Final

import h11
import msgspec

from router import errors
from router.errors import ErrorAnswer
from tests.fuzz.stage import KEY, SSE, Client, Sighting, Story

ROWS: Final = {
    (row.status, row.code): row for row in vars(errors).values() if isinstance(row, ErrorAnswer)
}
WINDOW_S: Final = 0.25  # the router's replay_window, and what a busy machine adds to it
LATE_S: Final = 1.0


class Ground(msgspec.Struct):
    """What everything stood on."""

    strict: bool = True
    keyed: bool = False  # clients need a key


class Read(msgspec.Struct):
    """One answer as a client finds it."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool

    @property
    def last(self) -> bool:
        """Whether the connection ends with it."""
        return "close" in self.headers.get("connection", "")

    @property
    def mark(self) -> str | None:
        """Which backend's answer it is; None for one of the router's own."""
        return self.headers.get("x-mark")


class Reader:
    """Finds answers in what a client got."""

    def __init__(self, client: Client) -> None:
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        if client.got:  # an empty piece is the end to h11
            self._h11.receive_data(bytes(client.got))
        self._eof = client.end == "eof"
        self._ended = False  # h11 was told so

    def next(self) -> Read | None:
        """The next answer, whole or not; None when no head came."""
        reader = self._h11
        if reader.our_state is h11.DONE and reader.their_state is h11.DONE:
            reader.start_next_cycle()
        if reader.our_state is not h11.IDLE or self._ended:
            return None
        reader.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
        reader.send(h11.EndOfMessage())
        answer: Read | None = None
        while True:
            try:
                event = reader.next_event()
            except h11.RemoteProtocolError as error:
                if not self._ended:
                    raise AssertionError("the router wrote what is no HTTP") from error
                return answer
            if isinstance(event, h11.Response):
                headers = {name.decode(): value.decode() for name, value in event.headers}
                assert len(headers) == len(list(event.headers)), "a header is repeated"
                answer = Read(event.status_code, headers, b"", complete=False)
            elif isinstance(event, h11.Data):
                assert answer is not None
                answer.body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert answer is not None
                answer.complete = True
                return answer
            elif event is h11.NEED_DATA and self._eof and not self._ended:
                self._ended = True
                reader.receive_data(b"")
            else:
                return answer

    def check_rest(self) -> None:
        """Nothing came behind the last answer."""
        assert self._h11.trailing_data[0] == b"", "bytes that belong to no answer"


def read_answers(client: Client) -> list[Read | None]:
    """The answers to a client's requests, in their order."""
    reader = Reader(client)
    found = [reader.next() for _ in client.stories]
    if found[-1] is None or found[-1].complete:
        reader.check_rest()
    return found


def check_client(client: Client, lines: dict[str, list[dict[str, Any]]], ground: Ground) -> None:
    """Every story of one connection."""
    answers = read_answers(client)
    lost = False  # what follows a broken answer on a connection is never begun
    for story, answer in zip(client.stories, answers, strict=True):
        told = lines.get(story.id, [])
        try:
            check_story(client, story, answer, told, ground, lost=lost)
        except AssertionError as error:
            seen = "\n  ".join(map(repr, story.sightings))
            got = (
                None if answer is None else msgspec.structs.replace(answer, body=answer.body[-99:])
            )
            told_of = f"{client.visit}, ended by {client.end}, {ground}, lost={lost}"
            raise AssertionError(f"{story.id}: {told_of}\n  {seen}\n  {got}\n  {told}") from error
        if answer is None or not answer.complete or answer.last:
            lost = True


def check_story(
    client: Client,
    story: Story,
    answer: Read | None,
    told: list[dict[str, Any]],
    ground: Ground,
    *,
    lost: bool,
) -> None:
    """One request; `lost`: the answer before it ended the connection."""
    assert len(told) <= 1, "counted twice"
    check_replays(story, strict=ground.strict)
    check_requests(story, client, keyed=ground.keyed)
    if client.end == "left":
        check_left(story, answer, told)
    elif answer is None:
        assert lost or not ground.strict, "no answer"
        assert not story.sightings or not ground.strict
    else:
        assert len(told) == 1, "answered and not counted"
        check_answer(client, story, answer, told[0], strict=ground.strict)


def check_requests(story: Story, client: Client, *, keyed: bool) -> None:
    """What reached a backend is what was sent, without the client's key."""
    for sighting in story.sightings:
        assert sighting.body == story.body
        assert b"sk-client" not in sighting.head
        assert sighting.head.count(b"x-request-id: ") == 1
        assert client.visit.key == KEY or not keyed


def check_replays(story: Story, *, strict: bool) -> None:
    """Nothing is sent again but by the table of replays."""
    moves = 0
    for seen, following in pairwise(story.sightings):
        if following.role is seen.role:  # (b)
            assert seen.reused
            assert not following.reused
            assert not seen.began or not strict
            assert following.at - seen.at < WINDOW_S + LATE_S
        else:  # (c)
            moves += 1
            assert seen.plan.refuses
            assert seen.whole
    assert moves <= 1
    assert len(story.sightings) <= 4


def check_left(story: Story, answer: Read | None, told: list[dict[str, Any]]) -> None:
    """A client that left got nothing wrong until then, and what it started was counted."""
    if story.sightings:
        assert len(told) == 1, "at work and not counted"
    if answer is not None and answer.mark is not None:
        sighting = marked(story, answer)
        assert sighting.given.startswith(answer.body) or explicit(answer, sighting)


def marked(story: Story, answer: Read) -> Sighting:
    """Whose answer it is."""
    (sighting,) = [seen for seen in story.sightings if seen.mark == answer.mark]
    assert answer.status == sighting.plan.status
    assert answer.headers["x-crossover-backend"] == sighting.role
    assert answer.headers["content-type"] == sighting.plan.kind
    return sighting


def explicit(answer: Read, sighting: Sighting) -> bool:
    """Whether it is what the backend gave and then an error event of ours."""
    head, found, _ = answer.body.rpartition(b'data: {"error":{')
    if not found or sighting.plan.kind != SSE or not sighting.given.startswith(head):
        return False
    event = answer.body[len(head) :]
    return any(row.event == event for row in ROWS.values())


def check_answer(
    client: Client, story: Story, answer: Read, told: dict[str, Any], *, strict: bool
) -> None:
    """Bytes out are bytes in, or an explicit break."""
    assert answer.headers["x-request-id"] == story.id
    assert told["status"] == answer.status
    if answer.mark is None:
        assert answer.complete
        error = json.loads(answer.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (answer.status, error["code"]) in ROWS
        assert told["error"] == error["code"]
        assert told["outcome"] in {"rejected", "backend_lost", "timeout", "broken"}
        return
    sighting = marked(story, answer)
    assert told["backend"] == sighting.role
    if told["outcome"] in {"ok", "client_error", "refused"}:
        assert answer.complete
    if answer.complete and not explicit(answer, sighting):
        assert told["bytes_out"] == len(answer.body)
        if sighting.plan.framing == "close" and not strict:
            # The network may have ended it with a FIN, which nobody can tell from its end.
            assert sighting.given.startswith(answer.body)
            return
        assert answer.body == sighting.given
        assert sighting.whole
        assert told["outcome"] in {"ok", "client_error", "refused", "backend_error"}
        return
    # Broken: it shows, what came is right, and there was a reason.
    assert answer.complete is (explicit(answer, sighting) and client.visit.http10)
    assert sighting.given.startswith(answer.body) or explicit(answer, sighting)
    assert told["outcome"] in {"backend_lost", "timeout", "broken", "client_gone"}
    assert not (sighting.whole and strict) or told["outcome"] in {"timeout", "client_gone"}
