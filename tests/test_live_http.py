"""`loadtest compare --live` over real HTTP: two simulated servers on one GPU, and the real router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadtest.__main__ import main
from loadtest.live_borrow import Borrowed, borrowed
from loadtest.live_files import LiveDirectory, Loan
from loadtest.live_load import Wanted
from loadtest.live_router import RouterAdmin
from loadtest.live_run import run_live
from loadtest.live_schema import (
    Change,
    LiveError,
    LiveFailedError,
    Offered,
    decode_comparison,
)
from loadtest.record import read_records
from loadtest.sweep_cli import command_given
from loadtest.sweep_run import real_instruments
from router.policies import make_policy
from router.rules import JoinPolicy
from tests.calibrations import written
from tests.engines import looped
from tests.live_pair import KEY, NOBODY, QUICK, options, pair, policy_of
from tests.stack import running_router, until
from tests.sweeps import BASE, SPEC, Notes

ROOT = Path(__file__).parent.parent


class StopError(Exception):
    """Ends a comparison in a test."""


@pytest.mark.slow
@looped
async def test_three_policies_at_two_loads(tmp_path: Path) -> None:
    """A pair planted to cross at 12 is measured so through the router, after a stop half-way."""
    out = tmp_path / "out"
    loads = (Offered(in_flight=2), Offered(in_flight=24))

    def stop(title: str) -> None:
        if title == "speculative, pass 1, 2 in flight":
            raise StopError

    async with pair(tmp_path, time_scale=0.35, dwell=0) as found:
        before = policy_of(found.stack)
        asked = options(
            found.stack, out, wanted=Wanted(loads=loads, output_tokens=24, input_tokens=40),
            pace=msgspec.structs.replace(QUICK, window_s=0.8),
        )  # fmt: skip
        with pytest.raises(StopError):
            await run_live(asked, Notes(stop))
        assert policy_of(found.stack) == before
        assert [c.run for c in decode_comparison((out / "compare.json").read_bytes()).cells] == [
            "baseline-1-2",
            "speculative-1-2",
        ]
        notes = Notes()
        result = await run_live(asked, notes)
        assert policy_of(found.stack) == before
        assert found.stack.in_flight() == (0, 0)
        bodies = {
            engine.config.role: [
                json.loads(s.body) for s in engine.seen if s.path == "/v1/chat/completions"
            ]
            for engine in (found.spec, found.base)
        }
    assert [at for _, at, _ in notes.begun] == [2, 3, 4, 5]
    assert notes.begun[0] == ("frontier, pass 1, 2 in flight", 2, 6)
    assert notes.begun[1][0] == "speculative, pass 1, 24 in flight"  # another one is first
    by = {(each.policy, each.load): each for each in result.outcomes}
    assert len(by) == 6
    assert by["speculative", "2"].ms_per_token.value < by["baseline", "2"].ms_per_token.value
    assert by["baseline", "24"].tok_s.value > 1.2 * by["speculative", "24"].tok_s.value
    # The rule follows the better server at both loads.
    shares = {key: each.speculative_share for key, each in by.items()}
    assert (shares["baseline", "2"], shares["speculative", "24"]) == (0.0, 1.0)
    assert shares["frontier", "2"] == pytest.approx(1.0)
    assert shares["frontier", "24"] < 0.2
    assert all(each.errors == 0 and each.requests > 3 for each in result.outcomes)
    assert [each.load for each in result.advice] == ["2", "24", None]
    assert decode_comparison((out / "compare.json").read_bytes()) == result
    assert "frontier" in (out / "summary.txt").read_text(encoding="utf-8")
    assert (out / "compare.png").stat().st_size > 10_000
    assert not (out / "borrowed.json").exists()
    records = list(read_records(out / "records-frontier-1-24.jsonl"))
    assert all(r.reason and r.n is not None and r.m is not None for r in records)
    assert {r.run for r in records} == {"frontier-1-24"}
    same_prompts(bodies)


def same_prompts(bodies: dict[Any, list[dict[str, Any]]]) -> None:
    """Every policy was asked the same texts and lengths in order, and no server a prompt twice."""
    for asked in bodies.values():
        texts = [body["messages"][0]["content"] for body in asked]
        assert len(set(texts)) == len(texts)
    starts: dict[str, dict[tuple[str, str], tuple[str, int]]] = defaultdict(dict)
    for body in bodies[SPEC] + bodies[BASE]:
        sign, text = body["messages"][0]["content"].removeprefix("(Request ").split(") ", 1)
        salt, number, step, at = sign.split("-")
        if number == "1":
            starts[salt][step, at] = text, body["max_tokens"]
    # A salt for each policy and each start of the command.
    assert len(starts) >= 4
    together: dict[tuple[str, str], set[tuple[str, int]]] = defaultdict(set)
    for found in starts.values():
        for place, asked_for in found.items():
            together[place].add(asked_for)
    assert all(len(each) == 1 for each in together.values())
    assert len(together) > 30


CHANGES: list[tuple[dict[str, Any], Change, str]] = [
    (
        {"threshold": 12, "band": 0.4, "dwell": 3},
        {"policy": "frontier", "threshold": 12.0, "scope": "total", "band": 0.4, "dwell": 3.0},
        "K",
    ),
    (
        {"threshold": "always", "scope": "speculative"},
        {"policy": "frontier", "threshold": "always", "scope": "speculative"},
        "always",
    ),
    ({"policy": "round-robin"}, {"policy": "round-robin"}, "round-robin"),
]


@pytest.mark.parametrize(
    ("settings", "expected"), [case[:2] for case in CHANGES], ids=[case[2] for case in CHANGES]
)
@looped
async def test_given_back_as_it_was(settings: dict[str, Any], expected: Change) -> None:
    """Whatever a router decided by, it decides by again, and in all of its figures."""
    async with (
        running_router(*NOBODY, admin_key=KEY, **settings) as stack,
        RouterAdmin(stack.admin_url, key=KEY) as admin,
    ):
        before = policy_of(stack)
        found = await admin.status()
        assert expected.items() <= found.policy.change.items()
        hand = Borrowed(admin, found.policy.change)
        assert await hand.give_back(asyncio.sleep) is None
        assert stack.relay.decisions.view(limit=9) == []  # nothing was changed
        assert await hand.decide({"policy": "baseline"}) == "baseline"
        assert policy_of(stack) == ("baseline",)
        assert await hand.give_back(asyncio.sleep) is None
        assert policy_of(stack) == before
        # An operator's own line, other than the configured one.
        await admin.set_policy({"policy": "frontier", "threshold": 7, "scope": "speculative"})
        before = policy_of(stack)
        hand = Borrowed(admin, (await admin.status()).policy.change)
        await hand.decide({"policy": "least-in-flight"})
        assert await hand.give_back(asyncio.sleep) is None
        assert policy_of(stack) == before == ("frontier", "speculative", 7.0, *before[3:])


@looped
async def test_a_rule_by_curves_is_given_back(tmp_path: Path) -> None:
    """A router that was started with a rule is told `frontier`, which means that rule to it."""
    settings = {"calibration": written(tmp_path), "rule": "join-delay"}
    async with (
        running_router(*NOBODY, admin_key=KEY, **settings) as stack,
        RouterAdmin(stack.admin_url, key=KEY) as admin,
    ):
        before = stack.relay.policy
        assert isinstance(before, JoinPolicy)
        found = (await admin.status()).policy
        assert (found.name, found.change) == ("join-delay", {"policy": "frontier"})
        hand = Borrowed(admin, found.change)
        await hand.decide({"policy": "baseline"})
        assert await hand.decide({"policy": "frontier"}) == "join-delay"
        await hand.decide({"policy": "speculative"})
        assert await hand.give_back(asyncio.sleep) is None
        assert stack.relay.policy is before


@looped
async def test_what_a_killed_one_left_is_put_back(tmp_path: Path) -> None:
    """After SIGKILL the router decides by what was being measured; the next start mends it."""
    before: Change = {
        "policy": "frontier",
        "threshold": 5,
        "scope": "total",
        "band": 0.1,
        "dwell": 1,
    }
    async with (
        running_router(*NOBODY, admin_key=KEY) as stack,
        RouterAdmin(stack.admin_url, key=KEY) as admin,
    ):
        directory = LiveDirectory(tmp_path)
        await admin.set_policy({"policy": "baseline"})
        await asyncio.sleep(0.05)  # a file's time is coarse
        directory.lend(Loan(admin.url, before))
        notes = Notes()
        async with borrowed(admin, directory, notes, real_instruments()) as hand:
            assert policy_of(stack) == ("frontier", "total", 5.0, 0.1, 1.0)
            assert hand.before == before
            await hand.decide({"policy": "round-robin"})
        assert policy_of(stack) == ("frontier", "total", 5.0, 0.1, 1.0)
        assert "Putting back what a comparison that was killed has left: frontier" in notes.said
        assert not (tmp_path / "borrowed.json").exists()


@looped
async def test_somebody_else_changes_the_policy(tmp_path: Path) -> None:
    """A cell under a policy that an operator changed is not kept, and the operator's will is done."""
    async with pair(tmp_path) as found:
        relay = found.stack.relay

        def change() -> None:
            relay.policy = make_policy("round-robin")

        with pytest.raises(LiveFailedError, match="by round-robin and no longer by baseline"):
            await run_live(options(found.stack, tmp_path / "out"), Notes(goes=change))
        assert policy_of(found.stack) == ("RoundRobinPolicy",)
        written = decode_comparison((tmp_path / "out" / "compare.json").read_bytes())
        assert written.cells == ()


@looped
async def test_a_server_dies(tmp_path: Path) -> None:
    """A dead server ends it with what to mend; what is measured is kept and the policy put back."""
    async with pair(tmp_path) as found:
        before = policy_of(found.stack)
        asked = options(found.stack, tmp_path / "out", settle_s=0.5)
        with pytest.raises(LiveFailedError, match="does not use the speculative server at http"):
            await run_live(asked, Notes(lambda _: found.spec.kill()))  # and the router fails over
        assert policy_of(found.stack) == before
        written = decode_comparison((tmp_path / "out" / "compare.json").read_bytes())
        assert [cell.run for cell in written.cells] == ["baseline-1-2"]


@looped
async def test_the_router_goes(tmp_path: Path) -> None:
    """Where the policy cannot be put back it is said what to do by hand, and it stays owed."""
    directory = LiveDirectory(tmp_path)
    quick = real_instruments()._replace(sleep=lambda _: asyncio.sleep(0))
    async with running_router(*NOBODY, admin_key=KEY) as stack:
        with pytest.raises(LiveFailedError) as raised:
            async with (
                RouterAdmin(stack.admin_url, key=KEY) as admin,
                borrowed(admin, directory, Notes(), quick) as hand,
            ):
                await hand.decide({"policy": "baseline"})
                await stack.router.stop()
                raise LiveFailedError("first this")
    text = str(raised.value)
    assert text.startswith(
        "first this; the router's policy could not be put back (no router's admin"
    )
    assert f'send POST {stack.admin_url}/policy with {{"policy":"frontier"' in text
    assert (tmp_path / "borrowed.json").exists()


@looped
async def test_cancelled_while_giving_back(tmp_path: Path) -> None:
    """A signal that comes while the policy is being put back does not stop that."""
    directory = LiveDirectory(tmp_path)
    async with running_router(*NOBODY, admin_key=KEY) as stack:
        before = policy_of(stack)

        async def work() -> None:
            async with (
                RouterAdmin(stack.admin_url, key=KEY) as admin,
                borrowed(admin, directory, Notes(), real_instruments()) as hand,
            ):
                await hand.decide({"policy": "baseline"})
                asyncio.get_running_loop().call_soon(task.cancel)  # when giving back has begun

        task = asyncio.ensure_future(work())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert policy_of(stack) == before
        assert not (tmp_path / "borrowed.json").exists()


@looped
async def test_other_clients_are_in_the_way(tmp_path: Path) -> None:
    """Servers that do not become idle are refused with who has requests."""
    async with pair(tmp_path, time_scale=1.0) as found:
        chat = asyncio.ensure_future(
            found.stack.chat(max_tokens=2000, ignore_eos=True, stream=True)
        )
        await until(lambda: found.stack.in_flight() != (0, 0))
        with pytest.raises(LiveFailedError, match="in flight: speculative 1"):
            await run_live(options(found.stack, tmp_path / "out", settle_s=0.1), Notes())
        chat.cancel()
        await asyncio.gather(chat, return_exceptions=True)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"admin_key": None}, {}, "has no admin key.* CROSSOVER_ADMIN_KEY .*LOADTEST_ADMIN_KEY"),
    ({}, {"admin_key": "wrong"}, "wants the router's admin key: put it into LOADTEST_ADMIN_KEY"),
    (
        {"policy": "round-robin", "threshold": None},
        {"policies": ("round-robin", "frontier")},
        "refuses the policy frontier: .*needs a threshold.*leave it out of --policies",
    ),
]


@pytest.mark.parametrize(("settings", "fields", "words"), REFUSED, ids=["none", "wrong", "policy"])
@looped
async def test_refused(
    tmp_path: Path, settings: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    """What the router refuses is a bad value with how to mend it, and nothing stays changed."""
    async with pair(tmp_path, **settings) as found:
        before = policy_of(found.stack)
        with pytest.raises(LiveError, match=words) as raised:
            await run_live(options(found.stack, tmp_path / "out", **fields), Notes())
        assert not isinstance(raised.value, LiveFailedError)
        assert "\n" not in str(raised.value)
        assert policy_of(found.stack) == before
        assert not (tmp_path / "out" / "borrowed.json").exists()


@looped
async def test_two_addresses_of_one_router(tmp_path: Path) -> None:
    """A server's own address in place of the router's is seen before anything is measured."""
    async with pair(tmp_path) as found:
        wrong = options(found.stack, tmp_path / "out", url=found.base.url)
        with pytest.raises(LiveError, match="--url and --admin-url are those of one router"):
            await run_live(wrong, Notes())
        wrong = options(found.stack, tmp_path / "out", admin_url=found.stack.url)
        with pytest.raises(LiveError, match="--admin-url is not the admin listener"):
            await run_live(wrong, Notes())


@looped
async def test_a_trace(tmp_path: Path) -> None:
    """A trace is played alike under each policy, each arrival with its own lengths."""
    trace = tmp_path / "t.csv"
    lines = [f"{at / 10},{30 + at},{8 + at % 3}" for at in range(20)]
    trace.write_text("\n".join(["seconds,prompt,output", *lines]), encoding="utf-8")
    two = ("baseline", "speculative")
    async with pair(tmp_path, time_scale=0.02) as found:
        wanted = Wanted(loads=(Offered(scale=8.0),), trace=trace)
        scaled = await run_live(
            options(found.stack, tmp_path / "t", wanted=wanted, policies=two), Notes()
        )
    starts = {
        policy: [r.started for r in sorted(
            read_records(tmp_path / "t" / f"records-{policy}-1-x8.jsonl"), key=lambda r: r.started)]
        for policy in two
    }  # fmt: skip
    for found_at in starts.values():
        # Ten lines a second, eight times as fast; a request starts when it is due or later.
        assert all(at >= n / 80 - 1e-6 for n, at in enumerate(found_at))
    asked = [
        sorted(r.asked_tokens or 0 for r in read_records(path))
        for path in (tmp_path / "t").glob("records-*.jsonl")
    ]
    assert all(set(tokens) == {8, 9, 10} for tokens in asked)
    assert scaled.conditions.workload.trace is not None
    assert scaled.advice[0].load == "x8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
@looped
async def test_ended_by_a_signal(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Ctrl-C, even twice, and SIGTERM put the policy back, keep what is measured and say so."""
    async with pair(tmp_path) as found:
        before, out = policy_of(found.stack), tmp_path / "out"
        arguments = [
            "compare", "--live", "--url", found.stack.url, "--admin-url", found.stack.admin_url,
            "--out", str(out), "--seconds", "0.2", "--warm-up", "0.1", "--loads", "2,3,4,5",
            "--policies", "baseline,round-robin", "--output-tokens", "16",
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadtest", *arguments, cwd=ROOT,
            env=os.environ | {"LOADTEST_ADMIN_KEY": KEY},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            first = out / "records-baseline-1-2.jsonl"
            await until(lambda: first.exists() and found.stack.in_flight() != (0, 0), 20)
            assert policy_of(found.stack) != before
            process.send_signal(number)
            process.send_signal(number)
            _, errors = await asyncio.wait_for(process.communicate(), 10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        assert process.returncode == code, errors
        assert policy_of(found.stack) == before
        await until(lambda: found.stack.in_flight() == (0, 0))
    said = errors.decode().splitlines()
    assert said[-1] == "Stopped; the router decides as before. The same command goes on from here."
    assert "Traceback" not in errors.decode()
    assert KEY not in "".join(path.read_text("utf-8") for path in out.glob("*.json*"))
    assert not (out / "borrowed.json").exists()
    assert [c.run for c in decode_comparison((out / "compare.json").read_bytes()).cells] == [
        "baseline-1-2"
    ]


LIVE = ["compare", "--live", "--url", "http://127.0.0.1:9", "--admin-url", "http://127.0.0.1:9"]
BAD: list[tuple[list[str], int, str]] = [
    (["compare", "--live"], 2, "--live needs the router: --url and --admin-url"),
    (["compare", "--loads", "3"], 2, "--loads is not for a comparison without --live"),
    ([*LIVE, "--arm", "x"], 2, "--arm is not for a comparison with --live"),
    ([*LIVE, "--policies", "fastest"], 2, "--policies are of baseline, speculative"),
    ([*LIVE, "--loads", "2.5"], 2, "--loads are whole numbers"),
    ([*LIVE, "--loads", "a"], 2, "--loads are numbers above 0"),
    ([*LIVE, "--rate", "0"], 2, "--rate are numbers above 0"),
    ([*LIVE, "--rate", "1", "--loads", "2"], 2, "one of --loads, --rate and --trace"),
    ([*LIVE, "--scale", "2"], 2, "--scale is for --trace"),
    ([*LIVE, "--admin-url", "host"], 2, "--admin-url looks like http://127.0.0.1:9400"),
    ([*LIVE, "--url", "host"], 2, "looks like http://127.0.0.1"),
    (LIVE, 1, "no router's admin listener answers at http://127.0.0.1:9"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), BAD)
def test_bad_values(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    """A bad value is exit code 2, a router that is not there 1, each with one line."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    error = capsys.readouterr().err.strip()
    assert words in error
    assert "\n" not in error


def test_command_without_password() -> None:
    """The command in the file is as typed, but for users and passwords in URLs."""
    typed = ["/x/loadtest", "compare", "--url", "http://a:b@h/v1", "--out", "my dir"]
    assert command_given(typed) == "loadtest compare --url http://h/v1 --out 'my dir'"
