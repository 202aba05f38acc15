"""`GET /events` of the admin listener: the feed of decisions as a stream of server-sent events.

One response, one task of its own beside the request's: it waits for the client to leave. A client that
does not read is dropped by the feed, and its connection ends at the latest with the write timeout.
The key is checked in front of the app, in a header: it never stands in a URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router import errors
from router.decision_feed import DecisionFeed, Listener, TooManyListenersError
from router.web import AnswerError

HEADERS: Final = {
    "content-type": "text/event-stream",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy in between must not collect them
}


class EventStream(Response):
    """Sends what a listener gets until one of the two ends it."""

    def __init__(self, feed: DecisionFeed, listener: Listener) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._feed = feed
        self._listener = listener

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        listener = self._listener
        gone = asyncio.create_task(_until_gone(receive, listener))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while (piece := await listener.take()) is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._feed.leave(listener)
            gone.cancel()


async def _until_gone(receive: Receive, listener: Listener) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    listener.close()


def listen(feed: DecisionFeed, clock: Callable[[], float], last_id: str) -> EventStream:
    """A stream from the event after `last_id` on. Raises AnswerError (503) when all places are taken."""
    try:
        return EventStream(feed, feed.join(clock(), last_id))
    except TooManyListenersError as error:
        raise AnswerError(errors.TOO_MANY_LISTENERS) from error
