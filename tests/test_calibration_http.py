"""The calibration in force in a running router, in front of two simulated servers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.engine import EngineConfig, RunningEngine, running_engine
from router.admin_models import CalibrationItem, Status
from router.calibration import CalibrationError
from router.load import Role
from tests.calibrations import document, planted
from tests.stack import Stack, run, running_router, until

SPEC, BASE = Role.SPECULATIVE, Role.BASELINE
# Every interval so short that a test sees what takes minutes in production.
QUICK: dict[str, Any] = {
    "threshold": None,
    "calibration_interval": 0.02,
    "acceptance_smoothing": 0.3,
    "pair_interval": 0.05,
}


async def status(stack: Stack) -> Status:
    """What /status says now."""
    got = await stack.client.get(stack.admin_url + "/status")
    return Status.model_validate_json(got.content)


async def metric(stack: Stack, name: str) -> float | None:
    """One series of a scrape, by its name with labels."""
    text = (await stack.client.get(stack.admin_url + "/metrics")).text
    rows = [line.split() for line in text.splitlines()]
    return next((float(row[1]) for row in rows if row[0] == name), None)


async def seen(stack: Stack, check: Callable[[Status, CalibrationItem], bool]) -> Status:
    """The status as soon as this holds of it."""
    async with asyncio.timeout(20):
        while True:
            found = await status(stack)
            assert found.calibration is not None
            if check(found, found.calibration):
                return found
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def busy(stack: Stack, clients: int = 2) -> AsyncIterator[list[int]]:
    """Clients that ask one thing after another; the statuses that they got."""
    got: list[int] = []

    async def ask() -> None:
        while True:
            response = await stack.chat(max_tokens=48, ignore_eos=True)
            got.append(response.status_code)

    tasks = [asyncio.create_task(ask()) for _ in range(clients)]
    try:
        yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def line(found: Status) -> object:
    """The threshold in force."""
    return found.policy.frontier.threshold if found.policy.frontier is not None else None


def engines() -> tuple[EngineConfig, EngineConfig]:
    fast: dict[str, Any] = {"time_scale": 0.01, "max_running_requests": 256}
    return (
        EngineConfig.quick(SPEC, accept_length=2.8, **fast),
        EngineConfig.quick(BASE, **fast),
    )


def test_the_threshold_follows_the_servers_acceptance_and_returns(tmp_path: Path) -> None:
    """2.8, then 1.6, then 2.8: the threshold on /status goes down to a third and comes back to K."""
    path = tmp_path / "c.json"
    path.write_bytes(document(16, curves=planted()))

    async def work() -> None:
        spec, base = engines()
        async with (
            running_engine(spec) as one,
            running_engine(base) as other,
            running_router(one.url, other.url, calibration=path, **QUICK) as stack,
            busy(stack) as got,
        ):
            # The first figures are of a few steps, and the smoothing here is of a few figures.
            await seen(stack, lambda now, item: (item.accept_length or 0) > 2.4 and line(now) == 16)
            one.core.accept(1.6)
            found = await seen(stack, lambda _, item: (item.accept_length_ratio or 1) < 0.65)
            found = await seen(stack, lambda now, _: line(now) in {4.0, 5.0, 6.0})
            assert found.calibration is not None
            assert found.calibration.threshold == 16
            assert (await metric(stack, "crossover_threshold") or 99) <= 7
            assert await metric(stack, "crossover_threshold_calibrated") == 16
            assert 0.5 < (await metric(stack, "crossover_accept_length_ratio") or 0) < 0.7
            one.core.accept(2.8)
            await seen(stack, lambda now, _: line(now) == 16)
            assert set(got) == {200}

    run(work, 50)


def test_a_file_replaced_under_load_is_in_force_and_loses_nothing(tmp_path: Path) -> None:
    """Taken, refused while broken, taken again: every request is answered, and none stays counted."""
    path = tmp_path / "c.json"
    path.write_bytes(document(16))

    async def work() -> None:
        spec, base = engines()
        async with (
            running_engine(spec) as one,
            running_engine(base) as other,
            running_router(one.url, other.url, calibration=path, **QUICK) as stack,
        ):
            async with busy(stack, 4) as got:
                path.write_bytes(document("never", verdict="never"))
                found = await seen(stack, lambda now, _: line(now) == 0)
                assert found.calibration is not None
                assert found.calibration.verdict == "never"
                path.write_bytes(b"{")
                await seen(stack, lambda _, item: item.problem is not None)
                path.unlink()
                await seen(stack, lambda _, item: "cannot be read" in (item.problem or ""))
                assert line(await status(stack)) == 0
                path.write_bytes(document(5))
                await seen(stack, lambda now, item: line(now) == 5 and item.problem is None)
                assert await metric(stack, 'crossover_calibration_loads_total{result="ok"}') == 3
                await until(lambda: len(got) > 4)  # on a busy machine none has ended by now
            assert set(got) == {200}
            await seen(stack, lambda now, _: now.queue.in_flight == 0)

    run(work, 50)


def test_serve_ends_with_the_code_of_a_refused_configuration(tmp_path: Path) -> None:
    """The calibration of another model: exit 2, and one line that says which and how to mend it."""
    path = tmp_path / "c.json"
    path.write_bytes(document(16, fingerprint={"model": "llama-70b"}))

    async def work() -> None:
        spec, base = engines()
        async with running_engine(spec) as one, running_engine(base) as other:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "router", "serve", "--speculative", one.url,
                "--baseline", other.url, "--calibration", str(path),
                "--port", "0", "--admin-port", "0",
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, said = await process.communicate()
            assert process.returncode == 2
            lines = said.decode().splitlines()  # the log is on standard error too
            (text,) = (each for each in lines if each.startswith("crossover: calibration"))
            assert "it is of the model llama-70b, and the speculative server runs" in text
            assert "give the calibration of this pair" in text

    run(work, 40)


async def facts_of(engine: RunningEngine, role: Role, stack: Stack) -> dict[str, Any]:
    """The fingerprint that a calibrator would write for this server."""
    from router.fingerprint import read_fingerprint

    got = await stack.client.get(engine.url + "/server_info")
    return dict(read_fingerprint(role, got.content))


def test_another_model_is_refused_at_the_start_and_an_alarm_later(tmp_path: Path) -> None:
    """Servers that are up stop the start; those that come later never stop the serving."""
    path = tmp_path / "c.json"
    path.write_bytes(document(16))

    async def work() -> None:
        spec, base = engines()
        async with running_engine(spec) as one, running_engine(base) as other:
            async with running_router(one.url, other.url, calibration=path, **QUICK) as stack:
                facts = await facts_of(one, SPEC, stack) | await facts_of(other, BASE, stack)
                path.write_bytes(document(16, fingerprint=facts))
                await seen(stack, lambda _, item: item.matches is True)
                path.write_bytes(document(16, fingerprint=facts | {"model": "another"}))
                await seen(stack, lambda _, item: "another" in (item.problem or ""))
            port = one.port
            with pytest.raises(CalibrationError, match="it is of the model another"):
                async with running_router(one.url, other.url, calibration=path, **QUICK):
                    pass
        url = f"http://127.0.0.1:{port}"
        async with running_router(url, url + "/b", calibration=path, **QUICK) as stack:
            assert line(await status(stack)) == 16
            async with running_engine(spec, port=port):
                found = await seen(stack, lambda _, item: item.alarm is not None)
                assert found.policy.name == "baseline"
                assert await metric(stack, "crossover_calibration_trusted") == 0

    run(work, 50)


def test_requests_slower_than_the_curves_show_as_drift(tmp_path: Path) -> None:
    """The relay hands every whole answer to the meter, and /status says recalibrate."""
    curves = planted(accept=None)
    path = tmp_path / "c.json"
    # The engines make thousands of tokens a second; the curves promise some hundred.
    path.write_bytes(document(16, curves=curves))

    async def work() -> None:
        spec, base = engines()
        async with (
            running_engine(spec) as one,
            running_engine(base) as other,
            running_router(one.url, other.url, calibration=path, **QUICK) as stack,
            busy(stack, 3),
        ):
            found = await seen(stack, lambda _, item: SPEC in item.drift)
            assert found.calibration is not None
            assert found.calibration.drift[SPEC] > 2
            assert BASE not in found.calibration.drift
            advised = await seen(stack, lambda _, item: item.advice is not None)
            assert advised.calibration is not None
            assert "recalibrate: requests on the speculative" in (advised.calibration.advice or "")
            name = 'crossover_calibration_drift_ratio{backend="speculative"}'
            assert (await metric(stack, name) or 0) > 2

    run(work, 50)
