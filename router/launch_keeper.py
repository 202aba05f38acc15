"""Keeps one process and everything that it starts, and takes them all along when it ends.

    python -I -S launch_keeper.py [--remove FILE] COMMAND [ARGUMENT ...]

It is run as a file of its own, before every server and the router that `crossover launch` starts,
and uses the standard library alone: it must be small, and up before what it keeps.

standard input ends   the launcher is gone, or wants an end now: SIGKILL to all
SIGTERM, SIGINT       handed to the command's own process only: SGLang drains when its parent gets
                      it, and loses requests when its schedulers do
the command ends      SIGKILL to what it left behind; its code is ours, 128 + n after signal n
every end             the file to remove is removed, and its folder
this process is lost  the command gets SIGKILL by the kernel (PR_SET_PDEATHSIG)

"All" is the command's process group and every descendant: on Linux orphans of a subreaper stay its
descendants, whatever sessions they made for themselves.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
CANNOT_START = 127
REMOVE = "--remove"
KILL_SECONDS = 5.0  # until a killed process must be gone; one in the kernel's hands may not be
LINUX = sys.platform == "linux"


def main() -> int:
    """Run the command to its end, and take its file away. The exit code."""
    arguments, file = sys.argv[1:], None
    if arguments[:1] == [REMOVE]:
        file, arguments = Path(arguments[1]), arguments[2:]
    try:
        return run(arguments)
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                file.parent.rmdir()


def run(arguments: "list[str]") -> int:
    """Run the command to its end. The exit code."""
    wakeup, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    become_subreaper()
    keeper = os.getpid()
    try:
        command = subprocess.Popen(  # noqa: S603 (what the launcher was told to run)
            arguments,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=lambda: die_with(keeper),  # noqa: PLW1509 (this process has one thread)
        )
    except OSError as error:
        sys.stderr.write(f"cannot run {arguments[0]}: {error.strerror or error}\n")
        return CANNOT_START
    return keep(command, wakeup)


def become_subreaper() -> None:
    """Have orphans among our descendants become children of ours, not of init."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_subreaper() -> bool:
    """Whether orphans among our descendants become ours."""
    if not LINUX:
        return False
    found = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return found.value == 1


def die_with(parent: int) -> None:
    """Ask the kernel, in the new process, for a SIGKILL when the keeper is gone."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(CANNOT_START)


def keep(command: "subprocess.Popen[bytes]", wakeup: int) -> int:
    """Wait for the end of the command or of our input."""
    while True:
        ready, _, _ = select.select([0, wakeup], [], [])
        numbers = os.read(wakeup, 4096) if wakeup in ready else b""
        code = reap(command)
        if code is None and 0 in ready and not os.read(0, 4096):
            code = end_all(command)
        elif code is not None:
            end_all(command)
        if code is not None:
            return code
        for number in set(numbers) - {int(signal.SIGCHLD)}:
            command.send_signal(number)


def reap(command: "subprocess.Popen[bytes]") -> int | None:
    """Take the ends of all children, also of adopted ones; the command's exit code if it ended."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while command.returncode is None and (ended := os.waitid(os.P_ALL, 0, look)):
            if ended.si_pid == command.pid:
                command.poll()
            else:
                os.waitpid(ended.si_pid, 0)
    return None if command.returncode is None else exit_code(command.returncode)


def reap_these(pids: "list[int]") -> None:
    """Take the ends of those of these that are children of ours and have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def exit_code(returncode: int) -> int:
    """Return what a shell would say."""
    return 128 - returncode if returncode < 0 else returncode


def end_all(command: "subprocess.Popen[bytes]") -> int:
    """Kill the group and all descendants until there are none; 137, or how the command ended."""
    limit = time.monotonic() + KILL_SECONDS
    while time.monotonic() < limit:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(command.pid, signal.SIGKILL)
        left = descendants_of(os.getpid())
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        reap(command)
        if not left and command.poll() is not None:
            break
        time.sleep(0.01)
    return exit_code(command.returncode if command.returncode is not None else -signal.SIGKILL)


def descendants_of(pid: int, past: "Collection[int]" = ()) -> "list[int]":
    """Return the living descendants of a process, those below `past` and itself left out.

    None where there is no /proc.
    """
    parents = {}
    for entry in Path("/proc").iterdir() if LINUX else ():
        with contextlib.suppress(ValueError, OSError):
            child = int(entry.name)
            # pid (name with anything in it) state parent ...
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[child] = int(parent)
    found = {pid}
    grown = True
    while grown:
        new = {child for child, parent in parents.items() if parent in found} - found - {*past}
        found |= new
        grown = bool(new)
    return sorted(found - {pid})


if __name__ == "__main__":
    sys.exit(main())
