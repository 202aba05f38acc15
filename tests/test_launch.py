"""A launch in this process, with small servers in SGLang's place: starts, deaths, ends, hints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.engine import EngineConfig, running_engine
from router.doctor import Target
from router.doctor_facts import Pair, ServerFacts
from router.doctor_rules import examine
from router.launch import Job
from router.launch_backoff import Backoff
from router.launch_doctor import look, started_with
from router.launch_hints import Cause, hint_in
from router.launch_keeper import descendants_of
from router.launch_kept import Command, Keepers
from router.launch_process import Name, Watched, meaning
from router.load import Role
from tests.launching import SERVER, Lines, job, launched, processes, server
from tests.ports import free_ports

SPECULATIVE, BASELINE = Role.SPECULATIVE, Role.BASELINE


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run this in an event loop of the kind that a launch has."""
    asyncio.run(asyncio.wait_for(work(), 50.0))


def nap() -> str:
    """A time to sleep that is a mark: nobody else sleeps so long."""
    return f"{9000 + int(uuid.uuid4()) % 10**6}.{os.getpid()}"


def pair(mark: str = "600", **settings: Any) -> Job:
    """A launch of two small servers."""
    ports = dict(zip((SPECULATIVE, BASELINE), free_ports(2), strict=True))
    commands = {role: server(port, mark) for role, port in ports.items()}
    return job(commands, ports, **settings)


def dying(program: str, **settings: Any) -> Job:
    """A launch whose speculative server is this program."""
    ports = dict(zip((SPECULATIVE, BASELINE), free_ports(2), strict=True))
    commands = {
        SPECULATIVE: [sys.executable, "-I", "-S", "-c", program],
        BASELINE: server(ports[BASELINE]),
    }
    return job(commands, ports, **settings)


def pid_of(line: str) -> int:
    """The process id that a small server has printed."""
    found = re.search(r"up as (\d+)", line)
    assert found is not None
    return int(found[1])


@contextlib.asynccontextmanager
async def running(work: Job) -> AsyncIterator[Lines]:
    """A launch that is ready; it is told to end, and must end with 0, when the block does."""
    lines = Lines()
    task = asyncio.get_running_loop().create_task(launched(work, lines))
    try:
        await lines.wait("ready after")
        await lines.wait(work.router_url)
        yield lines
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await task == 0
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_from_start_to_end() -> None:
    """Both servers and the router start, lines have their names, and nothing is left at the end."""
    mark = nap()

    async def work() -> None:
        async with running(pair(mark)) as lines:
            assert len(processes(mark)) == 6  # keeper, server and child, twice
            ups = lines.having("up as")
            names = sorted(line.split(" | ")[0] for line in ups)
            assert names == ["baseline   ", "router     ", "speculative"]
            (ready,) = lines.having("| ready after")
            assert ready.startswith("crossover   | ready after ")
        assert processes(mark) == []
        assert lines.all[-1] == "crossover   | stopped"
        assert lines.having("stopping: the router drains, then the servers end")

    run(work)


def test_the_order_of_the_end() -> None:
    """The servers are still there when the router ends, and are told only then."""
    ports = dict(zip((SPECULATIVE, BASELINE), free_ports(2), strict=True))
    program = (
        "import signal, sys, time, threading, http.server\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "    def log_message(self, *args): pass\n"
        "s = http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H)\n"
        "def end(*_):\n"
        "    time.sleep(0.2); print('told', 'and', 'done', flush=True)\n"
        "    threading.Thread(target=s.shutdown).start()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "s.serve_forever()\n"
    )
    commands = {
        role: [sys.executable, "-I", "-S", "-c", program, str(port)] for role, port in ports.items()
    }
    (router_port,) = free_ports(1)
    router = [sys.executable, "-I", "-S", "-c", program, str(router_port)]
    work = job(commands, ports, router=router)._replace(router_address=("127.0.0.1", router_port))

    async def check() -> None:
        async with running(work) as lines:
            pass
        done = [line.split(" | ")[0].strip() for line in lines.having("told and done")]
        assert done[0] == "router"
        assert sorted(done[1:]) == ["baseline", "speculative"]

    run(check)


def test_a_server_that_dies_comes_back() -> None:
    """After SIGKILL a server's child goes too, it is started again, and again, later each time."""
    mark = nap()

    async def work() -> None:
        async with running(pair(mark)) as lines:
            first = [line for line in lines.having("up as") if line.startswith("speculative")]
            os.kill(pid_of(first[0]), signal.SIGKILL)
            await lines.wait("the speculative server is ready again after")
            assert len(processes(mark)) == 6
            second = [line for line in lines.having("up as") if line.startswith("speculative")]
            os.kill(pid_of(second[1]), signal.SIGKILL)
            await lines.wait("the speculative server is ready again after", 2)
            assert [line.split(" | ")[1] for line in lines.having("starting it again")] == [
                "the speculative server ended (killed by SIGKILL): starting it again in 0.05 s",
                "the speculative server ended (killed by SIGKILL): starting it again in 0.1 s, attempt 2",
            ]
            assert len(processes(mark)) == 6

    run(work)


def test_a_start_that_fails_later_is_tried_again(tmp_path: Path) -> None:
    """A server that was ready once is started again for ever, also when a start of it fails."""
    broken = tmp_path / "broken"
    program = f"import os\nif os.path.exists({str(broken)!r}):\n"
    program += " print('CUDA', 'out of memory', flush=True); raise SystemExit(4)\n" + SERVER
    ports = dict(zip((SPECULATIVE, BASELINE), free_ports(2), strict=True))
    commands = {role: server(port) for role, port in ports.items()}
    commands[SPECULATIVE][4] = program

    async def work() -> None:
        async with running(job(commands, ports)) as lines:
            (up,) = [line for line in lines.having("up as") if line.startswith("speculative")]
            broken.touch()
            os.kill(pid_of(up), signal.SIGKILL)
            await lines.wait("ended (exit code 4): starting it again", 3)
            assert len(lines.having("to mend it: lower --mem-fraction-static")) >= 2
            assert lines.having("ended (exit code 4): starting it again in 0.2 s, attempt 4")
            broken.unlink()
            await lines.wait("the speculative server is ready again")

    run(work)


def test_a_lost_keeper() -> None:
    """When a keeper itself is killed, its server goes with it and is started again."""

    async def work() -> None:
        async with running(pair("2")) as lines:
            (up,) = [line for line in lines.having("up as") if line.startswith("baseline")]
            status = Path(f"/proc/{pid_of(up)}/status").read_text(encoding="ascii")  # noqa: ASYNC240
            found = re.search(r"PPid:\s+(\d+)", status)
            assert found is not None
            os.kill(int(found[1]), signal.SIGKILL)
            await lines.wait("the baseline server ended (killed by SIGKILL)")
            await lines.wait("the baseline server is ready again")

    run(work)


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        (
            "print('no idea'); raise SystemExit(3)",
            9,
            ["ready (exit code 3)", "its log:", "  no idea"],
        ),
        ("raise SystemExit(0)", 9, ["before it was ready (exit code 0)", "it printed nothing"]),
        (
            "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')",
            8,
            [
                "  RuntimeError: CUDA out of memory. Tried",
                "to mend it: lower --mem-fraction-static",
            ],
        ),
        ("import sglang", 6, ["No module named 'sglang'", 'pip install ".[gpu]" in a clone']),
        (
            "import sys; sys.exit('error: unrecognized arguments: --x')",
            2,
            ["unrecognized arguments: --x", "to mend it: this SGLang does not know the flag"],
        ),
        ("raise OSError('[Errno 98] address already in use')", 3, ["to mend it: give the server"]),
        ("raise OSError('x does not appear to have a file named y')", 7, ["check --model"]),
    ],
)
def test_a_server_that_does_not_start(program: str, code: int, said: list[str]) -> None:
    """A server that ends before it was ready ends the launch, with its own words and a way out."""

    async def work() -> None:
        lines = Lines()
        assert await launched(dying(program), lines) == code
        for text in said:
            assert lines.having(text), lines.all
        assert lines.all[-1] == "crossover   | stopped"

    run(work)


def test_a_command_that_cannot_be_run() -> None:
    """A command that is not there is refused with its name."""
    ports = dict(zip((SPECULATIVE, BASELINE), free_ports(2), strict=True))
    commands = {SPECULATIVE: ["/nowhere/server"], BASELINE: server(ports[BASELINE])}

    async def work() -> None:
        lines = Lines()
        assert await launched(job(commands, ports), lines) == 2
        assert lines.having("cannot run /nowhere/server: No such file or directory")

    run(work)


def test_a_server_that_is_never_ready() -> None:
    """A server that is not ready in time is ended, and with it the launch."""

    async def work() -> None:
        lines = Lines()
        program = "import time; print('loading', flush=True); time.sleep(600)"
        assert await launched(dying(program, start_timeout=0.6), lines) == 9
        assert lines.having("the speculative server is not ready in time: ending it")
        assert lines.having("  loading")

    run(work)


def test_a_router_that_does_not_start() -> None:
    """The router's own refusal ends the launch with the router's exit code."""
    ports = dict(zip((SPECULATIVE, BASELINE), free_ports(2), strict=True))
    commands = {role: server(port) for role, port in ports.items()}
    router = [sys.executable, "-I", "-S", "-c", "raise SystemExit(2)"]

    async def work() -> None:
        lines = Lines()
        assert await launched(job(commands, ports, router=router), lines) == 2
        assert lines.having("the router ended before it was ready (exit code 2)")

    run(work)


def test_one_after_the_other() -> None:
    """Servers that may not start at once do not: the second begins when the first is ready."""

    async def work() -> None:
        async with running(pair(at_once=False)) as lines:
            told = [
                line.split(" | ")[1].split(":")[0].split(" after")[0]
                for line in lines.all
                if re.search("starting the|server is ready", line)
            ]
            assert told == [
                "starting the speculative server",
                "the speculative server is ready",
                "starting the baseline server",
                "the baseline server is ready",
            ]

    run(work)


def test_the_command_beside_the_other() -> None:
    """The one that starts second is started with the command for a GPU that is in use."""
    work = pair(at_once=False)
    servers = [
        type(each)(
            role=each.role,
            address=each.address,
            command=(*each.command, "alone"),
            beside=(*each.command, "beside"),
            env={},
        )
        for each in work.plan.servers
    ]
    plan = type(work.plan)(servers=(servers[0], servers[1]), at_once=False, share=work.plan.share)

    async def check() -> None:
        async with running(work._replace(plan=plan)) as lines:
            first, second = lines.having("starting the")
            assert first.endswith(" alone")
            assert second.endswith(" beside")
            (up,) = [line for line in lines.having("up as") if line.startswith("speculative")]
            os.kill(pid_of(up), signal.SIGKILL)
            await lines.wait("the speculative server is ready again")
            assert lines.having("starting the")[2].endswith(" beside")

    run(check)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_the_start(number: signal.Signals) -> None:
    """A signal while the servers load is a clean stop, at once."""
    mark = nap()
    program = f"import subprocess, time; subprocess.run(['sleep', '{mark}'])"

    async def work() -> None:
        lines = Lines()
        task = asyncio.get_running_loop().create_task(launched(dying(program), lines))
        await lines.wait("starting the baseline")
        while len(processes(mark)) < 3:  # the keeper, the program and what it has started
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), number)
        async with asyncio.timeout(5):
            assert await task == 0
        assert processes(mark) == []

    # Under nohup the tests were told to ignore a hang-up, and so would the launcher.
    before = signal.signal(
        number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    )
    try:
        run(work)
    finally:
        signal.signal(number, before)


def test_nohup() -> None:
    """A hang-up that the launcher was told to ignore, as nohup does, stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def work() -> None:
        async with running(pair()) as lines:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.1)
            assert lines.having("stopping") == []

    try:
        run(work)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal() -> None:
    """A second signal ends at once what does not end by itself, with a code of its own."""
    mark = nap()
    program = (
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.run(['sleep', '{mark}'])\n"
    )

    async def work() -> None:
        lines = Lines()
        task = asyncio.get_running_loop().create_task(
            launched(dying(program, stop_timeout=600.0), lines)
        )
        while len(processes(mark)) < 3:  # the keeper, the program and what it has started
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
        await lines.wait("stopping")
        await asyncio.sleep(0.1)
        assert not task.done()
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(5):
            assert await task == 130
        assert processes(mark) == []

    run(work)


def test_a_server_that_does_not_end() -> None:
    """A server that SIGTERM does not end is killed after its time, with its children."""
    mark = nap()
    program = (
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.run(['sleep', '{mark}'])\n"
    )

    async def work() -> None:
        lines = Lines()
        task = asyncio.get_running_loop().create_task(
            launched(dying(program, stop_timeout=0.3), lines)
        )
        while len(processes(mark)) < 3:  # the keeper, the program and what it has started
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            assert await task == 0
        assert processes(mark) == []

    run(work)


def test_what_a_server_prints() -> None:
    """Lines without an end, too long, with colours or a progress bar come out as lines."""
    program = (
        "import sys\n"
        "sys.stdout.write('x' * 100000 + '\\n')\n"
        "sys.stdout.write('10%\\r20%\\r30%\\r\\n\\x1b[31mred\\x1b[0m\\nno end')\n"
        "raise SystemExit(1)\n"
    )

    async def work() -> None:
        lines = Lines()
        assert await launched(dying(program), lines) == 9
        texts = [
            line.partition(" | ")[2] for line in lines.all if line.startswith("speculative | ")
        ]
        assert "".join(texts[:-3]) == "x" * 100000
        assert texts[-3:] == ["30%", "red", "no end"]

    run(work)


def test_a_keeper_ends_what_hides() -> None:
    """A keeper ends children that made sessions of their own and whose parents are gone."""
    mark = nap()
    program = (
        "import os, subprocess, time\n"
        f"subprocess.Popen(['sleep', '{mark}'], start_new_session=True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        os.execvp('sleep', ['sleep', '{mark}'])\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )

    async def work() -> None:
        keepers, lines = Keepers(), Lines()
        command = Command((sys.executable, "-I", "-S", "-c", program), os.environ)
        running = await keepers.start(command, lines.view.own)
        await lines.wait("up")
        assert len(processes(mark)) == 4
        assert running.alive
        running.kill()
        assert await keepers.end_of(running) == 137
        assert not running.alive
        assert processes(mark) == []
        lines.view.close()

    run(work)


def test_descendants() -> None:
    """The descendants of a process are found whatever its name, and those below another left out."""

    async def work() -> None:
        keepers = Keepers()
        program = "import time; open('/proc/self/comm', 'w').write('a) (b'); time.sleep(600)"
        command = Command((sys.executable, "-I", "-S", "-c", program), os.environ)
        running = await keepers.start(command, lambda text: None)
        while len(descendants_of(running.pid)) < 1:
            await asyncio.sleep(0.02)
        (child,) = descendants_of(running.pid)
        assert {running.pid, child} <= set(descendants_of(os.getpid()))
        assert not {running.pid, child} & set(descendants_of(os.getpid(), past={running.pid}))
        running.kill()
        await keepers.end_of(running)
        assert descendants_of(running.pid) == []

    run(work)


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (137, "killed by SIGKILL"), (255, "exit code 255")],
)
def test_exit_codes_in_words(code: int, words: str) -> None:
    """A code above 128 is a signal where there is one."""
    assert meaning(code) == words


def test_a_long_life_is_a_new_beginning() -> None:
    """The waits grow with each end in a row, and a server that was ready for a minute begins anew."""
    (port,) = free_ports(1)
    now = 0.0

    async def ready() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    async def work() -> None:
        nonlocal now
        lines = Lines()
        watched = Watched(
            Name("small", "small server"),
            lambda: Command(tuple(server(port, "1")), os.environ),
            ready,
            lines.view.say,
            keepers=Keepers(),
            backoff=Backoff(0.05, 0.2),
            start_seconds=20.0,
            clock=lambda: now,
        )
        task = asyncio.get_running_loop().create_task(watched.run())
        assert await watched.first is None
        waits = []
        for number, lived in enumerate((1.0, 59.0, 59.0, 61.0, 1.0), start=1):
            ups = await lines.wait("up as", number)
            now += lived
            os.kill(pid_of(ups[-1]), signal.SIGKILL)
            said = await lines.wait("starting it again in ", number)
            waits.append(said[-1].partition("again in ")[2])
            await lines.wait("the small server is ready again", number)
        assert waits == [
            "0.05 s",
            "0.1 s, attempt 2",
            "0.2 s, attempt 3",
            "0.05 s",
            "0.1 s, attempt 2",
        ]
        await watched.stop(5.0)
        await task
        lines.view.close()

    run(work)


def test_waits_double_to_a_bound() -> None:
    """Each end in a row doubles the wait; one that served for a minute begins anew."""
    backoff = Backoff(1.0, 10.0)
    assert [backoff.after(0.0) for _ in range(6)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff.after(59.9) == 10.0
    assert backoff.after(60.0) == 1.0
    assert backoff.after(0.0) == 2.0


@given(st.lists(st.floats(0, 200), max_size=2000))
def test_waits_are_bounded(served: list[float]) -> None:
    """Whatever happens for however long, the wait is within its bounds."""
    backoff = Backoff(0.5, 60.0)
    assert all(0.5 <= backoff.after(seconds) <= 60.0 for seconds in served)


@pytest.mark.parametrize(
    ("line", "cause", "mend"),
    [
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction",
            Cause.NO_MEMORY,
            "raise --mem-fraction-static",
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            Cause.NO_MEMORY,
            "raise --mem-fraction-static",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.",
            Cause.NO_MEMORY,
            "lower --mem-fraction-static",
        ),
        ("/usr/bin/python: No module named sglang", Cause.NO_SGLANG, "--python"),
        (
            "launch_server.py: error: ambiguous option: --cuda-graph-max-bs could match x, y",
            Cause.BAD_FLAG,
            "without",
        ),
        (
            "ValueError: To allow this, set the env var SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1",
            Cause.NO_MODEL,
            "give both servers a --context-length",
        ),
        (
            "OSError: a/b is not a local folder and is not a valid model identifier listed on",
            Cause.NO_MODEL,
            "--model",
        ),
    ],
)
def test_hints(line: str, cause: Cause, mend: str) -> None:
    """What SGLang and torch say when they end is recognised, and the way out fits."""
    hint = hint_in(["INFO loading", line, "Traceback"])
    assert hint is not None
    assert (hint.cause, hint.line) == (cause, line)
    assert mend in hint.mend


def test_no_hint() -> None:
    """A log without a known cause has no hint, and of two causes the last one counts."""
    assert hint_in(["INFO all is well"]) is None
    hint = hint_in(["CUDA out of memory", "address already in use"])
    assert hint is not None
    assert hint.cause is Cause.PORT_TAKEN


@pytest.mark.parametrize(
    ("version", "value", "rules"),
    [
        ("0.5.13", "0", {"spec-v2-env": "spoils"}),
        ("0.5.17", "1", {"spec-v2-env": "warning"}),
        ("0.5.17", None, {}),
    ],
)
def test_the_environment_is_judged(version: str, value: str | None, rules: dict[str, str]) -> None:
    """The doctor judges SGLANG_ENABLE_SPEC_V2 by what the speculative server was started with."""
    release = (0, 5, int(version.rpartition(".")[2]))
    facts = ServerFacts(version=version, release=release)
    env = {"PATH": "/bin"} | ({} if value is None else {"SGLANG_ENABLE_SPEC_V2": value})
    known = started_with(Pair(facts, facts), {SPECULATIVE: env, BASELINE: {}})
    found = {each.rule: str(each.severity) for each in examine(known).findings}
    assert {name: found[name] for name in found if name == "spec-v2-env"} == rules
    assert "spec-v2-env" not in {each.rule for each in examine(known).unjudged}


def test_the_doctor_looks() -> None:
    """On a pair the doctor's findings come as lines; on what is no SGLang it says so in one."""

    async def work() -> None:
        async with (
            running_engine(EngineConfig.quick(SPECULATIVE, context_length=4096)) as ours,
            running_engine(EngineConfig.quick(BASELINE)) as theirs,
        ):
            targets = (Target(SPECULATIVE, ours.url), Target(BASELINE, theirs.url))
            env = {SPECULATIVE: {"SGLANG_ENABLE_SPEC_V2": "1"}, BASELINE: {}}
            lines = await look(targets, env, 32)
            assert any(line.startswith("doctor: spoils: running-cap: ") for line in lines)
            assert any(
                line.startswith("doctor: warning: spec-v2-env (speculative)") for line in lines
            )
            assert lines[-1] == "doctor: what is said above spoils a calibration of this pair"
            posts = [seen for seen in ours.seen if seen.method == "POST"]
            assert posts == []
        (line,) = await look(targets, env, None)
        assert line.startswith("doctor: cannot reach the speculative server")

    run(work)


def test_an_error_of_the_launcher() -> None:
    """An error of the launcher itself ends everything in order, with the code of a failure."""
    mark = nap()
    work = pair(mark)
    first, second = work.plan.servers
    bad = msgspec.structs.replace(second, env={"A": object()})  # what no process can be given
    work = work._replace(plan=msgspec.structs.replace(work.plan, servers=(first, bad)))

    async def check() -> None:
        lines = Lines()
        assert await launched(work, lines) == 4
        assert lines.having("an error in the launcher itself: TypeError(")
        assert lines.all[-1] == "crossover   | stopped"
        assert processes(mark) == []

    run(check)


def test_a_command_that_is_too_long() -> None:
    """A process that the system refuses to make is a server that did not start."""
    ports = dict(zip((SPECULATIVE, BASELINE), free_ports(2), strict=True))
    commands = {SPECULATIVE: ["x" * 10**6], BASELINE: server(ports[BASELINE])}

    async def work() -> None:
        lines = Lines()
        assert await launched(job(commands, ports), lines) == 2
        assert lines.having("speculative | cannot run it: Argument list too long")

    run(work)
