"""What a web page of another site may ask of the public listener.

Whoever has a browser has an agent on this machine that sends what any page tells it to. It does not
let the page read an answer of another site, but a POST without a special header ("simple", or
`no-cors`) arrives and would take GPU time all the same. A browser says who made a request, in headers
that no script can set: `Sec-Fetch-Site` (Fetch Metadata; to https and to this machine itself) and,
with every POST, `Origin` (RFC 6454). Other clients send neither, and are not concerned.

Pure. Where a key is asked for, a page cannot know it; what an origin of `cors_origin` asks is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from router import errors

if TYPE_CHECKING:
    from router.errors import ErrorAnswer
    from router.incoming import Incoming

ANY: Final = b"*"
# These take no GPU time, and their answers cannot be read (RFC 9110 section 9.2.1).
SAFE: Final = frozenset({b"GET", b"HEAD", b"OPTIONS"})
# `none` is the user's own doing: an address typed, a bookmark.
_OWN_SITES: Final = frozenset({b"same-origin", b"none"})
_PORTS: Final = {b"http://": b":80", b"https://": b":443"}


def from_elsewhere(site: bytes | None, origin: bytes | None, host: bytes) -> bool:
    """Whether a browser says that a page of another origin than `host` made this request.

    Where `Sec-Fetch-Site` is there it decides: it is right behind a proxy too that says another Host.
    Of origins only those count that a page of the web can have: http, https and `null`.
    """
    if site is not None:
        return site.strip(b" \t").lower() not in _OWN_SITES
    if origin is None:
        return False
    origin = origin.strip(b" \t").lower()
    for scheme, port in _PORTS.items():
        if origin.startswith(scheme):
            named = origin.removeprefix(scheme).removesuffix(port)
            return named != host.strip(b" \t").lower().removesuffix(port)
    return origin == b"null"


class Pages:
    """Whose pages may do what costs something."""

    def __init__(self, origins: Iterable[str], *, keyed: bool) -> None:
        """`origins`: those of `cors_origin`; `keyed`: whether clients need a key."""
        self.origins = frozenset(origin.encode() for origin in origins)
        self._open = keyed or ANY in self.origins

    def error(self, incoming: Incoming) -> ErrorAnswer | None:
        """What is wrong with a request that a page of another site has made, if one has."""
        facts = incoming.facts
        if (
            not facts.foreign
            or self._open
            or incoming.method in SAFE
            or facts.origin in self.origins
        ):
            return None
        return errors.CROSS_SITE
