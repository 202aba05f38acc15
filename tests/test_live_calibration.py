"""`loadtest compare --live` and calibrations: which one it compares, the wait, and what is put back."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.__main__ import main
from loadtest.live_borrow import borrowed
from loadtest.live_calibration import made, said, until_in_force
from loadtest.live_files import LiveDirectory
from loadtest.live_router import InForce, RouterAdmin
from loadtest.live_run import run_live
from loadtest.live_schema import LiveError, LiveFailedError
from loadtest.sweep_run import real_instruments
from router.policy import FrontierPolicy
from tests.calibrations import written
from tests.engines import looped
from tests.live_pair import KEY, NOBODY, options, pair
from tests.stack import Stack, running_router, until
from tests.sweeps import Notes

FIRST, SECOND = "2026-01-01T00:00:00+00:00", "2026-02-02T00:00:00+00:00"


def threshold(stack: Stack) -> float:
    """K of the line in force."""
    policy = stack.relay.policy
    assert isinstance(policy, FrontierPolicy)
    return policy.frontier.threshold


def rewritten(folder: Path, created: str | None, line: int, **fields: Any) -> Path:
    """The calibration of the router, written anew as `calibrate` does: in one step."""
    place = folder / "made"
    place.mkdir(exist_ok=True)
    times = {} if created is None else {"created": created}
    new = Path(written(place, frontier={"threshold": line}, **times, **fields))
    return new.replace(folder / "calibration.json")


@pytest.mark.slow
@looped
async def test_a_comparison_right_after_a_calibration(tmp_path: Path) -> None:
    """It waits for the calibration that was just written, compares its line, and the router goes on
    following its file afterwards.
    """
    file = rewritten(tmp_path, FIRST, 12)
    settings: dict[str, Any] = {"threshold": None, "calibration": str(file)}
    settings["calibration_interval"] = 0.5
    async with pair(tmp_path, **settings, dwell=0) as found:
        stack = found.stack
        await until(lambda: threshold(stack) == 12.0)
        rewritten(tmp_path, SECOND, 3)
        assert threshold(stack) == 12.0
        notes = Notes()
        asked = options(stack, tmp_path / "out", policies=("frontier",), calibration=file)
        result = await run_live(asked, notes)
        assert result.conditions.line["threshold"] == 3.0
        assert f"frontier is the line of {file} (made {SECOND})" in notes.said
        assert stack.relay.policy is stack.relay.configured
        rewritten(tmp_path, FIRST, 7)  # what was borrowed is not an operator's line now
        await until(lambda: threshold(stack) == 7.0)


@looped
async def test_what_is_put_back(tmp_path: Path) -> None:
    """A configured line is put back as such, and an operator's own by its figures."""
    async with (
        running_router(*NOBODY, admin_key=KEY, threshold=12) as stack,
        RouterAdmin(stack.admin_url, key=KEY) as admin,
    ):
        directory, tools = LiveDirectory(tmp_path), real_instruments()
        configured = stack.relay.policy
        async with borrowed(admin, directory, Notes(), tools) as hand:
            assert (hand.before, hand.line["threshold"]) == ({"policy": "frontier"}, 12.0)
            await hand.decide({"policy": "baseline"})
        assert stack.relay.policy is configured
        await admin.set_policy({"policy": "frontier", "threshold": 5})
        async with borrowed(admin, directory, Notes(), tools) as hand:
            assert hand.before == hand.line
            await hand.decide({"policy": "baseline"})
        assert threshold(stack) == 5.0


@looped
async def test_a_wait_that_is_over(tmp_path: Path) -> None:
    """A router that decides by another calibration, by none or by one that it does not trust is said."""
    file = rewritten(tmp_path, FIRST, 12)
    tools = real_instruments()

    async def wait(admin: RouterAdmin, path: Path = file) -> InForce:
        return await until_in_force(admin, path, limit_s=0.1, clock=tools.clock, sleep=tools.sleep)

    async with running_router(*NOBODY, threshold=3) as stack, RouterAdmin(stack.admin_url) as admin:
        with pytest.raises(LiveError, match="the router has no calibration"):
            await wait(admin)
    settings: dict[str, Any] = {"calibration": str(file), "calibration_interval": 0.02}
    async with running_router(*NOBODY, **settings) as stack, RouterAdmin(stack.admin_url) as admin:
        assert (await wait(admin)).created == FIRST
        (tmp_path / "elsewhere").mkdir()
        other = rewritten(tmp_path / "elsewhere", SECOND, 3)
        with pytest.raises(LiveFailedError, match=re.escape(f"but by {file} (made {FIRST})")):
            await wait(admin, other)
        file.write_text("{")
        await until(lambda: stack.relay.calibration.problem is not None)  # type: ignore[union-attr]
        with pytest.raises(LiveFailedError, match="what the file holds now is refused: "):
            await wait(admin, other)
        found = (await admin.status()).calibration
        assert "what that file holds now is not in force: " in str(said(found))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("{", "cannot be used: "),
        (
            '{"schema": "crossover.calibration/1", "frontier": {"threshold": 2}}',
            "does not say when",
        ),
    ],
)
def test_files_that_cannot_be_waited_for(tmp_path: Path, text: str | None, words: str) -> None:
    """A file that says nothing is refused in one line, before anything is asked."""
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LiveError, match=words):
        made(path)


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not there ends the command with 2, the router being asked for nothing."""
    monkeypatch.chdir(tmp_path)
    live = ["--live", "--url", "http://127.0.0.1:9", "--admin-url", "http://127.0.0.1:9"]
    assert main(["compare", *live, "--calibration", "nope.json"]) == 2
    assert "--calibration nope.json cannot be read" in capsys.readouterr().err


def test_what_is_said(tmp_path: Path) -> None:
    """Which calibration, and whether a newer one is in its file."""
    file = rewritten(tmp_path, SECOND, 3)
    found = InForce(path=str(file), created=FIRST, problem=None, alarm=None)
    assert said(None) is None
    assert said(msgspec.structs.replace(found, created=SECOND)) == (
        f"frontier is the line of {file} (made {SECOND})"
    )
    assert f"a newer one (made {SECOND}) is in that file and not in force yet" in str(said(found))
    elsewhere = msgspec.structs.replace(found, path="/nowhere/c.json", created=None)
    assert said(elsewhere) == (
        "frontier is the line of /nowhere/c.json (made at a time that it does not say)"
    )


@looped
async def test_one_that_is_not_trusted(tmp_path: Path) -> None:
    """A calibration of other servers is not compared as if it decided."""
    file = rewritten(tmp_path, FIRST, 12)

    class Alarmed(RouterAdmin):
        async def _call(self, method: str, path: str, body: object = None) -> bytes:
            status = json.loads(await super()._call(method, path, body))
            status["calibration"]["alarm"] = "another model"
            return json.dumps(status).encode()

    async with (
        running_router(*NOBODY, calibration=str(file)) as stack,
        Alarmed(stack.admin_url) as admin,
    ):
        with pytest.raises(LiveError, match=f"the router does not follow {file}: another model"):
            await until_in_force(admin, file, clock=time.monotonic, sleep=asyncio.sleep)
