"""The kinds of value that a setting can have, each with the spellings that people write.

A value is parsed once, here, into what the program calculates with: durations are seconds, sizes
are bytes, a backend's address is a `BackendUrl`. A message says what would have been right and
never repeats the value, because the value may be a secret; the report adds it where it may.
"""

import ipaddress
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretStr,
)

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?(ms|s|m|h)?", re.ASCII)
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
# More than anyone waits, and no more than every event loop's timers can count.
_A_YEAR = 365 * 86400.0
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)", re.ASCII | re.IGNORECASE)
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_HOST_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?(?:\.[a-z0-9_-]+)*\.?", re.ASCII)
_PREFIX = re.compile(r"(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})+)*", re.ASCII)
_ORIGIN = re.compile(r"\*|https?://[^/\s?#@]+", re.ASCII)
_VISIBLE = re.compile(r"[!-~]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class BackendUrl:
    """Where a backend listens, and what is put before every path that is sent to it."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> "BackendUrl":
        """Read `http(s)://host[:port][/prefix]`, or raise ValueError.

        The rule for the path: a trailing slash, and then one trailing `/v1`, are dropped; what is
        left is the prefix. So `http://host`, `http://host/` and `http://host/v1` are one backend.
        """
        if not _VISIBLE.fullmatch(text):
            raise ValueError("not a URL: a space, a control or a non-ASCII character is in it")
        if "?" in text or "#" in text:
            raise ValueError("a backend's URL has no query and no fragment")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise ValueError("its host or its port cannot be read") from None
        if parts.scheme not in {"http", "https"}:
            raise ValueError("not a URL of the form http(s)://host[:port][/prefix]")
        if "@" in parts.netloc:
            raise ValueError("a backend's URL has no user or password: use backend_api_key")
        host = _host(parts.hostname or "", bracketed=parts.netloc.startswith("["))
        if port == 0:
            raise ValueError("port 0 cannot be connected to")
        prefix = parts.path.removesuffix("/").removesuffix("/v1")
        if not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/")):
            raise ValueError("its path has an empty, a dotted or an unescaped segment")
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        return cls(scheme, host, port or (443 if scheme == "https" else 80), prefix)

    @property
    def authority(self) -> bytes:
        """What the Host header says: the port is left out where it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return (host if self.port == default else f"{host}:{self.port}").encode("ascii")

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority.decode('ascii')}{self.prefix}"


def _host(host: str, *, bracketed: bool) -> str:
    if bracketed:
        if "%" in host:
            raise ValueError("an IPv6 address with a zone cannot be a backend")
        return str(ipaddress.IPv6Address(host))
    if not _HOST_NAME.fullmatch(host):
        raise ValueError("no usable host name in it (IPv6 addresses go in brackets)")
    return host


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def read_keys(path: Path) -> tuple[SecretStr, ...]:
    """Read the keys in a file, one on a line; a line that starts with # is a comment.

    The ValueError names the line and not what is on it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(error.strerror or "cannot be read") from None
    except UnicodeDecodeError:
        raise ValueError("not a text file") from None
    keys = []
    for number, line in enumerate((line.strip() for line in lines), start=1):
        if line and not line.startswith("#"):
            try:
                keys.append(_key(SecretStr(line)))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    if not keys:
        raise ValueError("no key in it, which would let everyone in")
    return tuple(keys)


def _backend_url(value: object) -> BackendUrl:
    if isinstance(value, BackendUrl):
        return value
    if not isinstance(value, str):
        raise ValueError("not a URL")  # noqa: TRY004 (pydantic reports ValueError only)
    return BackendUrl.parse(value)


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not true or false")  # noqa: TRY004 (as above)
    return value


def _duration(value: object) -> object:
    if not isinstance(value, str):
        return _number(value)
    match = _DURATION.fullmatch(value)
    if not match:
        raise ValueError("not a duration: write seconds, or 250ms, 5s, 2m, 1h")
    return float(match[1]) * _DURATION_UNITS[match[2] or "s"]


def _size(value: object) -> object:
    if not isinstance(value, str):
        return _number(value)
    match = _SIZE.fullmatch(value)
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if not match or unit is None:
        raise ValueError("not a size: write bytes, or 8KiB, 64MiB, 1GiB (or kB, MB, GB)")
    return float(match[1]) * unit


def _threshold(value: object) -> object:
    words = {"always": math.inf, "inf": math.inf, "never": 0.0}
    if isinstance(value, str) and value in words:
        return words[value]
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not number >= 0:
        raise ValueError("not a number of requests from 0 up, nor always or never")
    return number


def _items(value: object) -> object:
    if not isinstance(value, str):
        return value
    items = [item for item in (part.strip() for part in value.split(",")) if item]
    if not items:
        raise ValueError("empty: leave it out to switch it off")
    return items


def _key(value: SecretStr) -> SecretStr:
    if not _VISIBLE.fullmatch(value.get_secret_value()):
        raise ValueError("a key is not empty and has only visible ASCII characters")
    return value


def _origin(value: str) -> str:
    if not _ORIGIN.fullmatch(value):
        raise ValueError("not an origin: write scheme://host[:port] with no path, or *")
    return value


def _listen_host(value: str) -> str:
    if not _VISIBLE.fullmatch(value) or "/" in value or value.startswith("["):
        raise ValueError("not an address or host name to listen on (no scheme, no brackets)")
    return value


def at_home(path: str | Path) -> Path:
    """A path with its ~ replaced; as for a shell, ~NAME stays what it is where nobody has the name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _existing(value: Path) -> Path:
    path = at_home(value)
    if path.is_dir():
        raise ValueError("a directory, not a file")
    if not path.is_file():
        raise ValueError("no such file")
    if not os.access(path, os.R_OK):
        raise ValueError("the file cannot be read")
    return path


@dataclass(frozen=True, slots=True)
class Unit:
    """What the numbers of a kind count; part of the kind, for whoever prints them."""

    name: str


SECONDS = Unit("SECONDS")
BYTES = Unit("BYTES")

Backend = Annotated[BackendUrl, PlainValidator(_backend_url), PlainSerializer(str)]
Seconds = Annotated[float, BeforeValidator(_duration), Field(gt=0, le=_A_YEAR), SECONDS]
SecondsOrZero = Annotated[float, BeforeValidator(_duration), Field(ge=0, le=_A_YEAR), SECONDS]
Size = Annotated[int, BeforeValidator(_size), Field(gt=0), BYTES]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_number), Field(ge=0)]
Port = Annotated[int, BeforeValidator(_number), Field(ge=0, le=65535)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1)]
ShareAboveZero = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)]
Factor = Annotated[float, BeforeValidator(_number), Field(ge=1, le=100)]
Threshold = Annotated[float, PlainValidator(_threshold)]
ListenHost = Annotated[str, AfterValidator(_listen_host)]
ExistingFile = Annotated[Path, AfterValidator(_existing)]
Key = Annotated[SecretStr, AfterValidator(_key)]
Keys = Annotated[tuple[Key, ...], BeforeValidator(_items)]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_origin)], ...],
    BeforeValidator(_items),
]
