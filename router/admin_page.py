"""The status page: one file, sent with a policy that lets it do nothing but ask this listener.

The page holds no data, so it is open; everything that it shows it asks for with the key. Its own script
and style are allowed by their digests, so nothing else is ever run or drawn, whatever
a backend or a client managed to have shown, and no request leaves this origin.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Final

from starlette.responses import Response

_BLOCK: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class StatusPage:
    """The page and its headers, read once."""

    def __init__(self) -> None:
        self.html = files("router").joinpath("status/index.html").read_text(encoding="utf-8")
        self.headers = {
            "content-security-policy": content_security_policy(self.html),
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-cache",
        }

    def response(self) -> Response:
        """The status page; it holds no data and asks for it with the key."""
        return Response(self.html, headers=self.headers, media_type="text/html; charset=utf-8")


def content_security_policy(html: str) -> str:
    """Only the script and style that stand in this page, and only requests to its own origin.

    Trusted Types take from the script what could turn text into markup.
    """
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _BLOCK.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(digests['script'])}",
            f"style-src {' '.join(digests['style'])}",
            "connect-src 'self'",
            "img-src data:",  # its icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
