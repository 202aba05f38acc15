"""What has to be there before the router starts under Compose: an admin key, and a line.

    python prepare.py          write the files for the router, Prometheus and Grafana
    python prepare.py show     print the admin key

It writes into /run/crossover, a volume that only those three mount, readable for their group alone:

    admin.key      the key itself: Prometheus' credentials file, Grafana's admin password
    router.toml    the same key and the line, as settings of `crossover serve`

The key is CROSSOVER_ADMIN_KEY if that is set, else the one that is there already, else a new
random one: nobody has to think of a key, and none is the same on two machines. The line is what
COMPOSE_PROFILES and the volume say: the shipped calibration of the simulated pair, the calibration
that `docker compose run --rm calibrate` made, or a threshold to begin with. Settings of the router
in the environment win: with CROSSOVER_THRESHOLD, _CALIBRATION or _POLICY set no line is written.

It uses the standard library alone. Exit codes: 0 written, 2 settings that cannot be used.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path("/run/crossover")
CALIBRATIONS = Path("/calibration")
SIMULATED = Path("/etc/crossover/simulated-calibration.json")
# Nobody knows the crossover of a pair that was never measured. This is where the speculative
# servers that we measured were still ahead, and `calibrate` replaces it.
FIRST_THRESHOLD = 32
SCOPES = {"shared": "total", "split": "speculative"}
LEAST_KEY = 16


class PrepareError(ValueError):
    """Settings that cannot be used; the message says what would do."""


def admin_key(folder: Path, environ: Mapping[str, str]) -> str:
    """The key to use. Raises PrepareError for one that is short or no word."""
    given = environ.get("CROSSOVER_ADMIN_KEY", "")
    if given:
        if len(given) < LEAST_KEY or not given.isascii() or not given.isprintable() or " " in given:
            raise PrepareError(
                f"CROSSOVER_ADMIN_KEY: at least {LEAST_KEY} printable ASCII characters without a "
                "space, or leave it out and one is made"
            )
        return given
    file = folder / "admin.key"
    kept = file.read_text(encoding="ascii").strip() if file.exists() else ""
    return kept or secrets.token_urlsafe(32)


def line(environ: Mapping[str, str], calibrations: Path = CALIBRATIONS) -> dict[str, object]:
    """The settings that say where the line is; none if the environment has them."""
    profiles = set(environ.get("COMPOSE_PROFILES", "").replace(" ", "").split(","))
    pair = profiles & {"gpu", "sim"}
    if len(pair) != 1:
        raise PrepareError(
            "COMPOSE_PROFILES: one of gpu and sim, since both pairs have the same names"
        )
    if any(environ.get(f"CROSSOVER_{name}") for name in ("THRESHOLD", "CALIBRATION", "POLICY")):
        return {}
    own = calibrations / f"{pair.pop()}.json"
    if own.exists():
        return {"calibration": str(own)}
    if "sim" in profiles:
        return {"calibration": str(SIMULATED)}
    layout = environ.get("GPU_LAYOUT") or "shared"
    if layout not in SCOPES:
        raise PrepareError(f"GPU_LAYOUT: shared or split, not {layout}")
    found: dict[str, object] = {"threshold": FIRST_THRESHOLD}
    if not environ.get("CROSSOVER_SCOPE"):
        found["scope"] = SCOPES[layout]
    return found


def write(folder: Path, name: str, text: str) -> None:
    """Put a whole file there, for owner and group to read."""
    new = folder / f".{name}.new"
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o440)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), 0o440)
        file.write(text)
    new.replace(folder / name)


def prepare(folder: Path, environ: Mapping[str, str], calibrations: Path = CALIBRATIONS) -> str:
    """Write both files and return what to say about it. Raises PrepareError."""
    settings = line(environ, calibrations)
    key = admin_key(folder, environ)
    # A string of JSON that holds only printable ASCII is a basic string of TOML.
    text = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items()]
    write(folder, "router.toml", "".join([f"admin_key = {json.dumps(key)}\n", *text]))
    write(folder, "admin.key", key)
    if "threshold" in settings:
        return (
            f"the pair is not calibrated: up to {FIRST_THRESHOLD} requests go to the speculative "
            "server, which is a guess; docker compose run --rm calibrate measures it"
        )
    said = settings.get("calibration", "as the environment says")
    return f"the line: {said}"


def main(arguments: list[str]) -> int:
    """Do what the arguments say and return the exit code."""
    try:
        if arguments == ["show"]:
            print((FOLDER / "admin.key").read_text(encoding="ascii"))
        elif arguments:
            raise PrepareError(f"no argument, or show, not {arguments[0]}")  # noqa: TRY301
        else:
            print(prepare(FOLDER, os.environ))
    except (PrepareError, OSError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
