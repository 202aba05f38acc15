"""The command `loadtest fit`: files in, a calibration file and words out. `fit` decides."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from loadtest.exit_codes import BAD_VALUE

if TYPE_CHECKING:
    from loadtest.contention import Both
    from router.calibration import Calibration


class Gpus(StrEnum):
    """Whether the two servers run on the same GPUs."""

    SHARED = "shared"
    SPLIT = "split"


class Aim(StrEnum):
    """What the line is chosen for."""

    THROUGHPUT = "throughput"
    TIME_PER_TOKEN = "time_per_token"  # noqa: S105 - not a password
    TTFT = "ttft"
    SLO = "slo"


class ManyFiles(TyperCommand):
    """A command whose file options take several values: `--baseline a.json b.json`."""

    MANY = ("--baseline", "--speculative")

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Put the option in front of each of its values, which is what the parser knows."""
        spread: list[str] = []
        option = ""
        for arg in args:
            if arg.startswith("-"):
                option = arg if arg in self.MANY else ""
                if not option:
                    spread.append(arg)
            elif option:
                spread += [option, arg]
            else:
                spread.append(arg)
        return super().parse_args(ctx, spread)


Files = list[Path]


def fit(
    baseline: Annotated[Files, typer.Option(help="Sweeps of the baseline server: its passes.")],
    speculative: Annotated[
        Files, typer.Option(help="Sweeps of the speculative server: its passes.")
    ],
    out: Annotated[Path, typer.Option(help="The calibration to write.")],
    contention: Annotated[
        Path | None,
        typer.Option(
            help="A folder with both.json (calibrate's) or contention_*.json: both at once."
        ),
    ] = None,
    gpus: Annotated[
        Gpus | None,
        typer.Option(help="Compare the total (shared) or the speculative server alone (split)."),
    ] = None,
    objective: Annotated[Aim, typer.Option(help="What the line is for.")] = Aim.THROUGHPUT,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="Limit for the time to the first token.", min=0.001)
    ] = None,
    slo_token_ms: Annotated[
        float | None, typer.Option(help="Limit for the time per token after it.", min=0.001)
    ] = None,
    no_rule: Annotated[
        bool, typer.Option("--no-rule", help="Do not try the switch rules on the curves.")
    ] = False,
) -> None:
    """Find where the two curves cross, how sure that is, and write it down for `crossover serve`.

    Reads sweep files of this project, request records, and the results of sglang.benchmark.serving,
    bench_one_batch_server, GuideLLM and AIPerf. Where there is a line, the switch rules are
    simulated on the curves, and the best is written too. The last line printed is the verdict:
    never, always, at or unsure. Exit code 0: written. 2: the input cannot be used.
    """
    from loadtest.conditions import FitError
    from loadtest.fit_words import describe
    from loadtest.ruled import with_rule
    from loadtest.service import CurveError
    from loadtest.sweep_schema import SweepError
    from loadtest.values import ResultsError
    from router.calibration import format_calibration

    limits_ms = {"--slo-ttft-ms": slo_ttft_ms, "--slo-token-ms": slo_token_ms}
    limits = [None if ms is None else ms / 1e3 for ms in limits_ms.values()]
    command = _command(baseline, speculative, contention, gpus, objective, limits_ms, out)
    try:
        made = _fitted(baseline, speculative, contention, gpus, objective, limits, command)
        made = made if no_rule else with_rule(made)
        out.write_bytes(format_calibration(made))
    except (ResultsError, SweepError, FitError, CurveError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        raise typer.Exit(BAD_VALUE) from error
    except OSError as error:
        print(f"loadtest: {error.filename}: {error.strerror}", file=sys.stderr)
        raise typer.Exit(BAD_VALUE) from error
    *said, verdict = describe(made)
    for line in [*said, f"written: {out}", verdict]:
        print(line)


def _fitted(
    baseline: Files,
    speculative: Files,
    contention: Path | None,
    gpus: Gpus | None,
    objective: Aim,
    limits: Sequence[float | None],
    command: str,
) -> Calibration:
    """Read everything and fit. Raises ResultsError, SweepError, FitError, OSError."""
    from loadtest.fit import fit as fit_pair
    from loadtest.importers import read_sweeps
    from loadtest.objectives import Slo
    from loadtest.points import of_role
    from router.load import Role

    sweeps = [
        [
            sweep
            for path in paths
            for sweep in of_role(read_sweeps(path.read_bytes(), path.name), role)
        ]
        for paths, role in ((baseline, Role.BASELINE), (speculative, Role.SPECULATIVE))
    ]
    return fit_pair(
        *sweeps,
        both=_both(contention) if contention is not None else (),
        gpus=None if gpus is None else gpus.value,
        objective=objective.value,
        slo=Slo(*limits),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command,
    )


def _both(folder: Path) -> Sequence[Both]:
    """Both servers at once, as `loadtest calibrate` keeps them or as files of others."""
    from loadtest.both_at_once import BOTH, as_runs, read_overlaps
    from loadtest.calibrate import SWEEP_NAME
    from loadtest.contention import pair_up
    from loadtest.sweep_schema import decode_sweep
    from loadtest.values import ResultsError

    if (folder / BOTH).exists():
        return as_runs(
            read_overlaps(folder / BOTH), decode_sweep((folder / SWEEP_NAME).read_bytes())
        )
    found = sorted(folder.glob("contention_*.json"))
    if not found:
        raise ResultsError(f"{folder} holds neither contention_*.json nor {BOTH}")
    return pair_up((path.name, path.read_bytes()) for path in found)


def _command(
    baseline: Files,
    speculative: Files,
    contention: Path | None,
    gpus: Gpus | None,
    objective: Aim,
    limits_ms: Mapping[str, float | None],
    out: Path,
) -> str:
    """The command again, without the folders: a calibration is shared, they are nobody's business."""
    words = ["loadtest", "fit"]
    words += ["--baseline", *(path.name for path in baseline)]
    words += ["--speculative", *(path.name for path in speculative)]
    words += ["--contention", contention.name] if contention is not None else []
    words += ["--gpus", gpus.value] if gpus is not None else []
    words += ["--objective", objective.value] if objective is not Aim.THROUGHPUT else []
    for option, ms in limits_ms.items():
        words += [option, f"{ms:g}"] if ms is not None else []
    return shlex.join([*words, "--out", out.name])
