"""One target in a process of its own.

    python -m tests.fuzz.worker TARGET FILE...              run it on files: how a crash is replayed
    python -m tests.fuzz.worker TARGET --seconds 60 --corpus DIRECTORY

With atheris (libFuzzer) when it is installed, which watches what code each input reaches; else with
plain mutation of seeds and words, which finds less and runs everywhere. What breaks a promise is
left in `DIRECTORY/crash-...`, and the exit code is not 0. The last line says how many inputs ran.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

MAX_LENGTH = 2048  # bytes of one input
CLOCK_EVERY = 64  # inputs between two looks at the clock
SLOW_S = 10  # an input that takes longer is a fault


def main(arguments: list[str]) -> int:
    """Fuzz or replay; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.worker")
    parser.add_argument("target")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--plain", action="store_true", help="mutation without atheris")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args(arguments)
    guided = importlib.util.find_spec("atheris") is not None and not told.plain and not told.files
    atheris = importlib.import_module("atheris") if guided else None
    if atheris is not None:
        with atheris.instrument_imports(include=["router", "tests.fuzz.targets"]):
            targets = importlib.import_module("tests.fuzz.targets")
    else:
        targets = importlib.import_module("tests.fuzz.targets")
    target: Callable[[bytes], None] | None = targets.TARGETS.get(told.target)
    if target is None:
        parser.error(f"no target {told.target!r}: choose one of {', '.join(targets.TARGETS)}")
    for file in told.files:
        target(file.read_bytes())
    if told.files:
        return 0
    if told.corpus is None:
        parser.error("--corpus or files are needed")
    told.corpus.mkdir(parents=True, exist_ok=True)
    corpus = importlib.import_module("tests.fuzz.corpus")
    if atheris is not None:
        return guided_run(atheris, target, corpus, told)
    return plain_run(target, corpus, told)


def guided_run(
    atheris: ModuleType,
    target: Callable[[bytes], None],
    corpus: ModuleType,
    told: argparse.Namespace,
) -> int:
    """Let libFuzzer run; it ends the process itself."""
    place = told.corpus / told.target
    place.mkdir(exist_ok=True)
    for seed in corpus.seeds(told.target):
        (place / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
    words = told.corpus / f"{told.target}.dict"
    escaped = ("".join(f"\\x{byte:02x}" for byte in word) for word in corpus.WORDS[told.target])
    words.write_text("".join(f'"{word}"\n' for word in escaped), encoding="ascii")
    atheris.Setup(
        [
            sys.argv[0],
            str(place),
            f"-max_total_time={told.seconds:.0f}",
            f"-max_len={MAX_LENGTH}",
            f"-dict={words}",
            f"-artifact_prefix={told.corpus}/",
            f"-timeout={SLOW_S}",
            "-print_final_stats=1",
            *([f"-seed={told.seed}"] if told.seed else []),
        ],
        target,
    )
    atheris.Fuzz()
    return 0


def plain_run(target: Callable[[bytes], None], corpus: ModuleType, told: argparse.Namespace) -> int:
    """Mutate seeds and words for so long."""
    chance = random.Random(told.seed)
    seeds, words = corpus.seeds(told.target), corpus.WORDS[told.target]
    end = time.monotonic() + told.seconds
    count = 0
    while count % CLOCK_EVERY or time.monotonic() < end:
        count += 1
        data = mutated(chance, seeds, words)
        try:
            target(data)
        except Exception:  # noqa: BLE001 (whatever it is, it is what we look for)
            name = hashlib.sha1(data, usedforsecurity=False).hexdigest()
            (told.corpus / f"crash-{name}").write_bytes(data)
            traceback.print_exc()
            return 1
    sys.stdout.write(f"Done {count} runs in {told.seconds:.0f} second(s), without guidance\n")
    return 0


def mutated(chance: random.Random, seeds: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """A seed, or nothing, after a few changes."""
    data = bytearray(chance.choice(seeds) if chance.random() < 0.7 else b"")
    for _ in range(chance.choice((1, 1, 2, 3, 5, 8, 13))):
        at = chance.randint(0, len(data))
        match chance.randrange(5):
            case 0:
                data[at:at] = chance.randbytes(chance.randint(1, 4))
            case 1:
                del data[at : at + chance.choice((1, 1, 2, 8, 40))]
            case 2 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 3:
                other = chance.choice(seeds)
                begin = chance.randint(0, len(other))
                data[at:at] = other[begin : begin + chance.randint(1, 60)]
            case _:
                data[at:at] = chance.choice(words)
    return bytes(data[:MAX_LENGTH])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
