"""Whether a request carries one of the client keys.

Only digests are kept, so that no dump of the process and no error shows a key, and so that keys of
any length compare in the same time. Every key is compared on every request, without an early exit:
how long a refusal takes tells nothing about how much of which key was right.

A key comes as `Authorization: Bearer KEY`, and on Anthropic's routes also as `x-api-key: KEY`, which
is what its clients send. A header given twice is refused rather than guessed about.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final, Protocol

Headers = Iterable[tuple[bytes, bytes]]

ANTHROPIC_PREFIXES: Final = (b"/v1/messages", b"/messages")
OPEN_PATHS: Final = frozenset({"/health", "/health_generate", "/ping", "/ready"})


class Secret(Protocol):
    """A key that does not show itself; pydantic's SecretStr is one."""

    def get_secret_value(self) -> str:
        """The key in clear."""
        ...


class HasKeys(Protocol):
    """Where the client keys come from; `router.config.Settings` is one."""

    def client_keys(self) -> Iterable[Secret]:
        """All keys that a client may use."""
        ...


def load_keys(settings: HasKeys) -> KeyRing:
    """The ring of all configured client keys; empty when none is configured.

    Reading the file of keys is for the settings to do, and so is refusing a bad one (ValueError).
    """
    return KeyRing(key.get_secret_value() for key in settings.client_keys())


class KeyRing:
    """The keys that are accepted, as digests. An empty ring accepts everything."""

    __slots__ = ("_digests",)

    def __init__(self, keys: Iterable[str]) -> None:
        """`keys` in clear; they are not kept."""
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._digests)

    def __repr__(self) -> str:
        return f"KeyRing({len(self._digests)} keys)"

    def accepts(self, headers: Headers, *, path: bytes = b"") -> bool:
        """Whether these headers carry a right key. `path` is the request's, without its query.

        Names are matched in any case. On the routes of `/v1/messages` an `x-api-key` counts when
        there is no Authorization header.
        """
        if not self._digests:
            return True
        authorization: list[bytes] = []
        api_key: list[bytes] = []
        for name, value in headers:
            lowered = name.lower()
            if lowered == b"authorization":
                authorization.append(value)
            elif lowered == b"x-api-key":
                api_key.append(value)
        if authorization:
            return len(authorization) == 1 and self._matches(_bearer(authorization[0]))
        if len(api_key) == 1 and is_anthropic(path):
            return self._matches(api_key[0].strip(b" \t"))
        return False

    def _matches(self, key: bytes) -> bool:
        given = hashlib.sha256(key).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found and bool(key)


def is_anthropic(path: bytes) -> bool:
    """Whether a path is one that Anthropic's clients call."""
    return any(path == prefix or path.startswith(prefix + b"/") for prefix in ANTHROPIC_PREFIXES)


def _bearer(value: bytes) -> bytes:
    """The credentials of the Bearer scheme, or nothing."""
    scheme, _, credentials = value.strip(b" \t").partition(b" ")
    return credentials.strip(b" \t") if scheme.lower() == b"bearer" else b""
