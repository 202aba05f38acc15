"""What `crossover launch` writes to standard error: everybody's lines behind their names, progress.

A terminal shows one moving line below the log; anything else gets plain lines, and one about the
progress now and then. A reader that is stuck must not stop the launcher, which would stop the
servers on full pipes: lines go through the bounded queue of `LineWriter`, and what does not fit is
dropped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.status import Status
from rich.text import Text

from router.logs import LineWriter, write_stderr

WIDTH: Final = len("speculative")
LINES: Final = 8192  # that may wait: a server prints hundreds at once when it starts or dies
OWN: Final = "crossover"
LEAST_SECRET: Final = 8  # characters: what is shorter stands in words that are none
_STYLES: Final = {OWN: "bold", "speculative": "cyan", "baseline": "green", "router": "magenta"}
_SECRET: Final = re.compile(r"key|token|secret|passw|auth|credential", re.IGNORECASE)
# Names that only sound like it.
_OPEN: Final = re.compile(r"token(s|izer)|keep|author", re.IGNORECASE)
_MOVING: Final = "\0"  # before what is progress and no line; a line has no such character
# What a terminal obeys: sequences, controls (also those of eight bits), other line ends, and what
# turns the direction of writing.
_ESCAPES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-9;?]*[A-Za-z]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
# A name and its value in one word: --name=value, NAME=value, and, in a command that is one word,
# --name value and "name": "value". Names begin where no name goes on and are bounded, so that a word
# of a megabyte is looked at once and not from each of its characters.
_NAMED: Final = re.compile(
    r"""(?<![\w-])(--?[\w-]{1,200}\s{1,9}|[\w-]{1,200}["']?\s{0,9}[=:]\s{0,9})"""
    r"""("[^"]*"|'[^']*'|[^\s"',}]+)"""
)


class View:
    """The one place that writes."""

    def __init__(
        self,
        console: Console | None = None,
        writer: LineWriter | None = None,
        *,
        secrets: Iterable[str] = (),
    ) -> None:
        """Without arguments: standard error as it is. `secrets` are shown in no line of anybody."""
        self._secrets = tuple(secret for secret in secrets if len(secret) >= LEAST_SECRET)
        self._console = console or Console(stderr=True, highlight=False)
        self.moving = self._console.is_terminal
        self._status: Status | None = None
        self._writer = writer or LineWriter(
            self._draw if self.moving else write_stderr, batches=LINES
        )

    def say(self, who: str, text: str) -> None:
        """One line of one process, or of ours."""
        # Of a line that was written over and over, as progress bars are, only the last counts.
        last = text.rstrip("\r").rpartition("\r")[2]
        clean = _ESCAPES.sub("", last.replace("\n", "\\n"))
        for secret in self._secrets:
            clean = clean.replace(secret, "***")
        line = f"{who:<{WIDTH}} | {clean}\n"
        self._writer.put(line.encode("utf-8", "backslashreplace"))

    def own(self, text: str) -> None:
        """A line of the launcher itself."""
        self.say(OWN, text)

    def progress(self, text: str | None) -> None:
        """Show what is waited for; None: nothing any more."""
        if self.moving:
            # By the way of the lines: one thread alone may touch the terminal.
            self._writer.put(f"{_MOVING}{text or ''}\n".encode())
        elif text is not None:
            self.own(text)

    def close(self) -> None:
        """Write what waits and end."""
        self.progress(None)
        if self._writer.dropped:
            self.own(f"{self._writer.dropped} lines were dropped: nobody read them in time")
        self._writer.close()

    def _draw(self, data: bytes) -> None:
        for line in data.decode("utf-8", "replace").removesuffix("\n").split("\n"):
            if line.startswith(_MOVING):
                self._move(line.removeprefix(_MOVING))
                continue
            who, bar, text = line.partition(" | ")
            style = _STYLES.get(who.strip(), "")
            self._console.print(Text.assemble((who + bar, style), text), soft_wrap=True)

    def _move(self, text: str) -> None:
        if not text:
            if self._status is not None:
                self._status.stop()
                self._status = None
        elif self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        else:
            self._status.update(Text(text))


def shown(command: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a command with its environment as a shell would take it, without secrets."""
    words = []
    hide = False
    for word in command:
        flag = word.startswith("--")
        words.append("***" if hide and not flag else _NAMED.sub(_hidden, word))
        hide = flag and "=" not in word and _is_secret(word)
    text = " ".join(word if word == "***" else shlex.quote(word) for word in words)
    settings = "".join(
        f"{name}={'***' if _is_secret(name) else shlex.quote(value)} "
        for name, value in env.items()
    )
    return settings + text


def _hidden(found: re.Match[str]) -> str:
    name = found[1]
    return f"{name}***" if _is_secret(name) else found[0]


def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(_OPEN.sub("", name)))
