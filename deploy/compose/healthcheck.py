"""Ask one URL and say with the exit code whether it answered 2xx: the image has no curl.

    python healthcheck.py [URL [SECONDS]]

Without a URL it is the one of the router's admin listener that needs no key. Exit codes: 0 it did,
1 it did not (and one line says what happened). It uses the standard library alone and follows no
proxy setting, since what it asks is this container itself.
"""

from __future__ import annotations

import http.client
import os
import sys
import urllib.parse

WAIT_S = 4.0
ALIVE = f"http://127.0.0.1:{os.environ.get('CROSSOVER_ADMIN_PORT') or 9400}/healthz"


def check(url: str, seconds: float = WAIT_S) -> str | None:
    """What is wrong with the answer to a GET; None for a status of 2xx within `seconds`."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=seconds)
    try:
        connection.request("GET", parts.path or "/")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {type(error).__name__}: {error}"
    finally:
        connection.close()
    return None if 200 <= status < 300 else f"{url}: status {status}"


def main(arguments: list[str]) -> int:
    """Check what the arguments name and return the exit code."""
    url, *seconds = arguments or [ALIVE]
    problem = check(url, *map(float, seconds))
    if problem is not None:
        print(problem)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
