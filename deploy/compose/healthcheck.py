"""Ask one URL and say with the exit code whether it answered 2xx: the image has no curl.

    python healthcheck.py [URL [SECONDS]]

Without a URL it is that of what runs here as process 1: the page of the router's admin listener
that needs no key, or /health of a simulated server. Exit codes: 0 it did, 1 it did not (and one line
says what happened). It uses the standard library alone and follows no proxy setting, since what it
asks is this container itself.
"""

from __future__ import annotations

import http.client
import os
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path

WAIT_S = 4.0


def alive_url(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Where the program with this command line says that it is alive."""
    simulated = "engine" in command
    flag = "--port" if simulated else "--admin-port"
    port = environ.get("CROSSOVER_ADMIN_PORT") or "9400"
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == flag:
            port = following
        elif word.startswith(f"{flag}="):
            port = word.partition("=")[2]
    return f"http://127.0.0.1:{port}/{'health' if simulated else 'healthz'}"


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
    if not arguments:
        command = Path("/proc/1/cmdline").read_text(encoding="utf-8", errors="replace")
        arguments = [alive_url(command.split("\0"), os.environ)]
    url, *seconds = arguments
    problem = check(url, *map(float, seconds))
    if problem is not None:
        print(problem)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
