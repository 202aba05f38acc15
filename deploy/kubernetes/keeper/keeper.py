"""Keeps one server running inside its container, and lets it end after the router.

    python3 -I keeper.py --after=HOST:PORT -- COMMAND [ARGUMENT...]

The process 1 of a server's container. Two things that Kubernetes does not do by itself:

* A server that ended is started again here, later and later (1 s to 60 s). If the container ended
  instead, the whole Pod would be unready for as long as it is not back, and the pair would serve
  nobody although its other server could.
* At the end of a Pod all containers get SIGTERM at once. The server gets it when the router is
  gone, which is when HOST:PORT (its admin listener, the last to close) refuses connections: until
  then running streams need it.

A server's leftovers (its group of processes) are ended before it is started again, since they hold
the GPU's memory. Nothing but the standard library is used: SGLang's image has no more. Arguments
are never printed, because keys are among them.

Exit codes: 0 after SIGTERM, 2 bad arguments, 127 a command that cannot be started.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

FIRST_S = 1.0  # until a server that ended is started again, the first time
LAST_S = 60.0  # and at most
WELL_S = 600.0  # a server that ran for so long is started again after FIRST_S
POLL_S = 0.2
CONNECT_S = 2.0


class Keeper:
    """One command, through all its lives. The clock and waits are those of this process."""

    def __init__(self, command: list[str], after: tuple[str, int] | None) -> None:
        """`after` is the address that must refuse connections before the server is ended."""
        self._command = command
        self._after = after
        self._ending = False
        self._child = 0  # its process id, 0 while there is none

    def run(self) -> int:
        """Keep it running until SIGTERM; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        pause = FIRST_S
        while not self._ending:
            begun = time.monotonic()
            self._child = os.posix_spawnp(
                self._command[0], self._command, os.environ, setpgroup=0, setsigdef=[signal.SIGTERM]
            )
            status = self._wait()
            self._sweep()
            self._child = 0
            if self._ending:
                break
            if time.monotonic() - begun > WELL_S:
                pause = FIRST_S
            say(f"the server ended ({meaning(status)}), it is started again in {pause:g} s")
            self._sleep(pause)
            pause = min(LAST_S, 2 * pause)
        say("ended")
        return 0

    def _end(self, *_: object) -> None:
        self._ending = True

    def _wait(self) -> int:
        """Wait for the end of the server; its status. On SIGTERM it is told, at the right time."""
        told = False
        while True:
            # Also what the server left behind and nobody else waits for: this is process 1.
            found, status = os.waitpid(-1, os.WNOHANG)
            if found == self._child:
                return status
            if self._ending and not told and not self._router_is_there():
                say("the router is gone: SIGTERM to the server")
                os.kill(self._child, signal.SIGTERM)
                told = True
            if not found:
                time.sleep(POLL_S)

    def _sleep(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while not self._ending and time.monotonic() < limit:
            time.sleep(POLL_S)

    def _sweep(self) -> None:
        """End what a server has left behind."""
        try:
            os.killpg(self._child, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _router_is_there(self) -> bool:
        if self._after is None:
            return False
        try:
            socket.create_connection(self._after, CONNECT_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # it is slow, which is not gone
        return True


def meaning(status: int) -> str:
    """A status of wait in words."""
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def say(text: str) -> None:
    """One line in the container's log."""
    sys.stderr.write(f"keeper: {text}\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    """Read the arguments and keep the server running."""
    own, _, command = (
        (arguments[: arguments.index("--")], "--", arguments[arguments.index("--") + 1 :])
        if "--" in arguments
        else (arguments, "", [])
    )
    after = None
    for argument in own:
        host, _, port = argument.removeprefix("--after=").rpartition(":")
        if not argument.startswith("--after=") or not host or not port.isdigit():
            say(f"{argument}: only --after=HOST:PORT may stand before --")
            return 2
        after = host.removeprefix("[").removesuffix("]"), int(port)
    if not command:
        say("a command is missing: keeper.py [--after=HOST:PORT] -- COMMAND [ARGUMENT...]")
        return 2
    try:
        return Keeper(command, after).run()
    except OSError as error:
        say(f"{command[0]} cannot be started: {error.strerror}")
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
