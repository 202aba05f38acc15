"""Which names the admin listener answers to where it has no key: its own machine's.

On loopback and without a key it trusts whoever is on this machine, and a browser is. What keeps the
pages of others from reading it is the browser's rule about origins, and a page whose own name is
made to resolve to 127.0.0.1 (DNS rebinding) passes that rule. Its requests say in `Host` which name
they were made for, and a script cannot change that; an address cannot be made to resolve elsewhere.
"""

from __future__ import annotations

import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from router import errors
from router.web import error_response


def is_own(host: bytes) -> bool:
    """Whether a Host header names this machine, or no machine at all, with a port or without."""
    text = host.decode("latin-1").strip(" \t").lower()
    bracketed = text.startswith("[")
    name = text[1:].partition("]")[0] if bracketed else text.partition(":")[0].removesuffix(".")
    if name in {"", "localhost"} or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class HostGuard:
    """Passes on what was asked of this machine by a name of its own."""

    def __init__(self, app: ASGIApp, paths: frozenset[str]) -> None:
        """`paths` tell nothing, and so may be asked for by any name."""
        self.app = app
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 421."""
        if scope["type"] == "http" and scope["path"] not in self.paths:
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if not all(map(is_own, hosts)):
                await error_response(errors.FOREIGN_HOST)(scope, receive, send)
                return
        await self.app(scope, receive, send)
