"""The ASGI scope of a request that is not relayed, as uvicorn would have made it.

Nothing of the relay's is in it: an app beside the relay sees what it would see under plain uvicorn.
"""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

    from router.frontend import RelayProtocol
    from router.incoming import Incoming


def scope_for(connection: RelayProtocol, incoming: Incoming) -> HTTPScope:
    """The scope of one request; its path is unquoted once, as ASGI wants it."""
    path = incoming.path.decode("ascii")
    _, _, query = incoming.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": connection.asgi_version, "spec_version": "2.3"},
        "http_version": incoming.version,
        "server": connection.server,
        "client": connection.client,
        "scheme": connection.scheme or "http",
        "root_path": connection.root_path,
        "method": incoming.method.decode("ascii"),
        "path": connection.root_path + urllib.parse.unquote(path),
        "raw_path": connection.root_path.encode("ascii") + incoming.path,
        "query_string": query.partition(b"#")[0],
        "headers": incoming.headers,
        "state": connection.app_state.copy(),
    }
