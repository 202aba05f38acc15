"""What `RelayProtocol` relies on in uvicorn, so that an incompatible release fails here first."""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import version

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

from router.listener import TICK, Listener


def test_streams_survive_sigterm_from_this_version_on() -> None:
    """Releases 0.43 and 0.44 cut running streams at shutdown."""
    major, minor = (int(part) for part in version("uvicorn").split(".")[:2])
    assert (major, minor) >= (0, 45)


def test_the_protocol_is_made_with_these_arguments() -> None:
    """The server makes a protocol from its config, its state and the app's state."""
    parameters = list(inspect.signature(HttpToolsProtocol.__init__).parameters)
    assert parameters == ["self", "config", "server_state", "app_state", "_loop"]


def test_a_cycle_takes_these_arguments_and_has_these_fields() -> None:
    """An ordinary request is run through uvicorn's own cycle, which we make ourselves."""
    parameters = list(inspect.signature(RequestResponseCycle.__init__).parameters)
    assert parameters[1:] == [
        "scope",
        "transport",
        "flow",
        "logger",
        "access_logger",
        "access_log",
        "default_headers",
        "message_event",
        "expect_100_continue",
        "keep_alive",
        "on_response",
    ]
    source = inspect.getsource(RequestResponseCycle)
    for field in ("body", "more_body", "keep_alive", "response_complete", "disconnected"):
        assert f"self.{field}" in source


def test_the_protocol_has_what_is_used_of_it() -> None:
    """Methods that are called or replaced, and the server's sets of connections and tasks."""
    for name in (
        "connection_made",
        "connection_lost",
        "data_received",
        "pause_writing",
        "resume_writing",
        "on_message_begin",
        "on_url",
        "on_header",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
        "shutdown",
        "_start_asgi_task",
    ):
        assert callable(getattr(HttpToolsProtocol, name))
    state = ServerState()
    assert state.connections == set()
    assert state.tasks == set()
    assert state.default_headers == []
    assert state.total_requests == 0


def test_the_server_ends_by_asking_each_connection_to() -> None:
    """Shutdown calls `shutdown()` of each connection and waits until they are gone."""
    source = inspect.getsource(Server.shutdown)
    assert "connection.shutdown()" in source
    # Listeners are closed first, and nothing is awaited before: see `Listener.shutdown`.
    assert "await" not in source[: source.index("connection.shutdown()")]
    assert source.index("sock.close()") < source.index("connection.shutdown()")
    waiting = inspect.getsource(Server._wait_tasks_to_complete)
    assert "self.server_state.connections" in waiting
    assert "force_exit" in waiting
    assert hasattr(Server, "capture_signals")


def test_a_class_can_stand_in_for_the_http_protocol() -> None:
    """`http=` takes a callable that makes protocols, and it is used as it is."""

    def make() -> None: ...

    config = uvicorn.Config("tests:none", http=make, ws="none", log_config=None)  # type: ignore[arg-type]
    config.load_app = lambda: None  # type: ignore[method-assign]
    config.load()
    assert config.http_protocol_class is make  # type: ignore[comparison-overlap]
    assert config.ws_protocol_class is None


def test_the_servers_loop_is_a_tick_that_says_when_to_end() -> None:
    """`main_loop`, which we replace, only waits; what it does is in `on_tick`, at a count of 0 too."""
    source = inspect.getsource(Server.main_loop)
    assert source.count("await self.on_tick(counter)") == 2
    assert "counter % 10 == 0" in inspect.getsource(Server.on_tick)


def test_a_listener_ends_when_it_is_asked_and_keeps_the_date_until_then() -> None:
    """It does not wait for its next look at the clock, and asked before it waits, it never waits."""

    async def work() -> None:
        for early in (True, False):
            config = uvicorn.Config(lambda: None, log_config=None, server_header=False)
            listener = Listener(config)
            if early:
                listener.leave()
            task = asyncio.create_task(listener.main_loop())
            await asyncio.sleep(0)
            assert [name for name, _ in listener.server_state.default_headers] == [b"date"]
            listener.leave()
            await asyncio.wait_for(task, TICK / 2)

    asyncio.run(work())
