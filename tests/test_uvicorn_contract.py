"""What `RelayProtocol` relies on in uvicorn, so that an incompatible release fails here first."""

from __future__ import annotations

import inspect
from importlib.metadata import version

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState


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
