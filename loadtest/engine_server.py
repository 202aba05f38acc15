"""The state of one simulated server that its routes share, and how a request is served.

`SimulatedServer.generate` is the one path of every generating route, whatever its dialect: dispatch
delay, queue or refusal, then a stream or one body. A stream's head is sent with its first chunk, as
SGLang does, so that headers mean a first token.

Which tokens come when is `engine_core`'s to say, which bytes are made of them the dialect's.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, NamedTuple

from loadtest.clock import Clock
from loadtest.engine_config import EngineConfig
from loadtest.engine_core import EngineCore
from loadtest.engine_errors import Refusal, bad_request, queue_full, queue_full_event
from loadtest.engine_generation import Generation
from loadtest.engine_http import DONE, SSE, Exchange
from loadtest.engine_metrics import Recorder
from loadtest.engine_prefix import PrefixCache, prompt_words, with_answer
from loadtest.engine_request import Wanted
from loadtest.engine_wire import Renderer, new_id

# Requests that are remembered for tests and doctors.
REMEMBERED: Final = 1000


class Seen(NamedTuple):
    """A request that the server received."""

    method: str
    path: str
    query: str
    headers: dict[str, str]  # lower-case names; the last of a repeated one
    body: bytes
    raw_headers: list[tuple[bytes, bytes]]


class Dialect(NamedTuple):
    """How one route answers: its stream and its body in one piece, given id and creation time."""

    stream: Callable[[Wanted, Generation, str, float], Renderer]
    body: Callable[[Wanted, Generation, str, float], bytes]
    overloaded: tuple[bytes, ...] = (queue_full_event(), DONE)  # a stream's chunks instead
    content_type: bytes = SSE


class SimulatedServer:
    """One simulated server, as its routes see it."""

    def __init__(self, config: EngineConfig, clock: Clock, core: EngineCore) -> None:
        self.config = config
        self.clock = clock
        self.core = core
        self.seen: deque[Seen] = deque(maxlen=REMEMBERED)
        self.in_flight = 0  # generating requests whose answer is not complete
        self.draining = False  # got SIGTERM
        self.crashed = False
        self.failing = False  # answers every generating request with a 500
        self.requests: Counter[tuple[str, str]] = Counter()  # by path and method
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self.recorder = Recorder()
        self.prefixes = PrefixCache(config.max_total_tokens)
        self.port = 0  # set as soon as it listens
        self.crash: Callable[[], None] = lambda: None
        self.tasks: set[asyncio.Future[None]] = set()  # to be cancelled at the end
        self._wall = time.time() - clock.now()
        self._rids: dict[str, Generation | None] = {}

    def wall(self, at: float | None = None) -> float:
        """Unix time in seconds, of a moment of the clock or of now."""
        return self._wall + (self.clock.now() if at is None else at)

    def scaled(self, seconds: float) -> float:
        """Real seconds for simulated ones."""
        return seconds * self.config.time_scale

    def remember(self, exchange: Exchange) -> None:
        """Keep what was received."""
        self.seen.append(
            Seen(
                exchange.method,
                exchange.path,
                exchange.query.decode("latin-1"),
                {name.decode(): value.decode("latin-1") for name, value in exchange.raw_headers},
                exchange.body,
                exchange.raw_headers,
            )
        )

    async def generate(self, exchange: Exchange, wanted: Wanted, dialect: Dialect) -> None:
        """Serve one generating request to its end."""
        if self.failing:
            raise Refusal(500, "Internal Server Error", "InternalServerError")
        rid = wanted.rid or new_id()
        if rid in self._rids:
            raise bad_request(f"Duplicate request ID detected: {rid}")
        self._rids[rid] = None
        self.in_flight += 1
        try:
            received = self.clock.now()
            await exchange.pause(self.scaled(self.core.curve.dispatch_s))
            if not exchange.gone:
                await self._serve(exchange, wanted, dialect, rid, received)
        finally:
            self.in_flight -= 1
            del self._rids[rid]

    def abort(self, rid: str) -> None:
        """Cancel the requests whose id starts like this, as SGLang's `/abort_request` does."""
        for known, generation in list(self._rids.items()):
            if generation is not None and known.startswith(rid):
                self.core.cancel(generation)

    async def die(self, exchange: Exchange) -> None:
        """A token that the model does not have: no answer, and the whole server goes down."""
        await exchange.pause(self.scaled(self.config.crash_s))
        if self.config.die_on_bad_token:
            self.crashed = True
            self.crash()
        await exchange.drop()

    async def _serve(
        self, exchange: Exchange, wanted: Wanted, dialect: Dialect, rid: str, received: float
    ) -> None:
        words = prompt_words(exchange.body) if self.config.prefix_cache else None
        generation = self.core.submit(
            [choice.prompt_tokens for choice in wanted.choices],
            [choice.output_tokens for choice in wanted.choices],
            [choice.finish for choice in wanted.choices],
            stream=wanted.stream,
            cached=0 if words is None else self.prefixes.hit(words),
        )
        if generation is None:
            await self._refuse(exchange, wanted, dialect)
            return
        self._rids[rid] = generation
        created = self.wall()
        if wanted.stream:
            exchange.abort = lambda: self.core.abort(generation)
            await self._stream(
                exchange, generation, dialect.stream(wanted, generation, rid, created)
            )
        else:
            exchange.abort = lambda: self._notice_later(generation, received)
            await generation.news()
            if generation.closed:
                await exchange.drop()
            else:
                await exchange.reply(200, dialect.body(wanted, generation, rid, created))
        exchange.abort = None
        if words is not None and not generation.closed:
            answer = wanted.choices[0].answer.text(0, generation.sequences[0].produced)
            chat = "messages" in exchange.path or "chat" in exchange.path
            self.prefixes.keep(with_answer(words, answer, chat=chat))
        self.recorder.observe(wanted, generation, received, self.clock.now())

    async def _stream(self, exchange: Exchange, generation: Generation, renderer: Renderer) -> None:
        started = False
        while events := await generation.news():
            for event in events:
                for chunk in renderer.events(event):
                    if not started:
                        started = True
                        await exchange.start_stream(renderer.content_type)
                    await exchange.write(chunk)
        if generation.closed:
            await exchange.drop()
            return
        for chunk in renderer.ending():
            await exchange.write(chunk)
        await exchange.end_stream()

    async def _refuse(self, exchange: Exchange, wanted: Wanted, dialect: Dialect) -> None:
        """The queue is full: a 503, which a stream wraps in a 200."""
        self.recorder.refused += 1
        if not wanted.stream:
            raise queue_full()
        await exchange.start_stream(dialect.content_type)
        for chunk in dialect.overloaded:
            await exchange.write(chunk)
        await exchange.end_stream()

    def _notice_later(self, generation: Generation, received: float) -> None:
        """A request that does not stream looks for its client only every few seconds."""
        poll = self.scaled(self.config.disconnect_poll_s)
        since = self.clock.now() - received
        self.later(poll - since % poll if poll else 0.0, lambda: self.core.abort(generation))

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in a while, unless the server has ended by then."""

        async def act() -> None:
            await self.clock.sleep(seconds)
            action()

        task = asyncio.ensure_future(act())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
