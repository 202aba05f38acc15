"""What `loadtest compare` does: read the pair and the load, play every arrangement, say what to run.

Files, printing and refusals are here; how an arrangement is played and judged is in `compare`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from rich.console import Console
from rich.progress import track

from loadtest.arms import (
    arm_curves,
    curve_from_levels,
    read_trace_file,
    shipped_trace,
)
from loadtest.compare import OUTPUT_TOKENS, Gpus, Load, Outcome, Pair, advice, arrangements, play
from loadtest.compare_report import draw, show
from loadtest.curve_files import read_curve
from loadtest.own_prompts import Talks, for_prompts, own_prompts_pair
from loadtest.plot import PlotError
from loadtest.ruled import levels_of, overlaps_of
from loadtest.service import CurveError, ServiceCurve
from loadtest.simulator_contention import H200, Contention
from loadtest.simulator_load import Row, day, steps
from router.calibrated import known_of
from router.calibration import Calibration, CalibrationError, parse_calibration
from router.load import Role

DAY_S: Final = 900.0
STEP_S: Final = 120.0
PLOTTED: Final = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
PLOTTED_S: Final = 240.0
# Times the wait at a server's largest measured level from which nobody keeps up with the load.
OVERLOAD: Final = 2.0
# The names of --curves, and which server of a file that holds both is meant.
ROLE_OF: Final = {
    "base": Role.BASELINE,
    "spec": Role.SPECULATIVE,
    "adaptive": Role.SPECULATIVE,
}
WIDTH: Final = 160  # columns, where the output is no terminal


class InputError(ValueError):
    """What was given cannot be used; the text says what and how to mend it."""


class Given(NamedTuple):
    """The command line."""

    curves: str | None
    calibration: Path | None
    arm: str | None
    trace: Path | None
    scale: float
    low: float
    shape: Literal["steady", "steps", "day"]
    seconds: float
    judged_after: float | None
    gpus: Gpus
    plot: Path | None
    turns: float | None = None  # of a conversation, in the mean; None: every request is on its own


def run_compare(given: Given, console: Console | None = None) -> list[Outcome]:
    """Play, print, and draw if asked to. Raises InputError."""
    console = console or _console()
    try:
        rows = shipped_trace() if given.trace is None else read_trace_file(given.trace)
        pair = read_pair(given, rows)
        load = make_load(given)
        outcomes = [
            play(each, load, rows)
            for each in track(arrangements(pair), "Simulating", console=console, transient=True)
        ]
        show(console, outcomes, _title(pair, load, given))
        console.print(advice(outcomes, given.gpus))
        if overloaded(pair, outcomes):
            console.print(
                f"Nothing here keeps up with this load (--scale {given.scale:g}): requests pile up, and"
                " the figures say how fast. Give a smaller --scale."
            )
        if given.plot is not None:
            over_load(given, pair, rows, given.plot, console)
    except (CurveError, CalibrationError, PlotError, ValueError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"{given.plot}: {error.strerror}") from error
    return outcomes


def _console() -> Console:
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)


def overloaded(pair: Pair, outcomes: Sequence[Outcome]) -> bool:
    """Whether even the best arrangement waits far longer than the servers do at their last level."""
    last = max(
        curve.points[-1][1] / curve.tokens_per_step for curve in (pair.speculative, pair.baseline)
    )
    return min(each.ms_per_token for each in outcomes) > OVERLOAD * 1e3 * last


def make_load(given: Given) -> Load | Talks:
    """The load that the command line asks for."""
    load = _requests(given)
    return load if given.turns is None else _talks(load, given.turns)


def _talks(load: Load, turns: float) -> Talks:
    name = f"{load.name}, conversations of {turns:g} turns"
    return Talks(name, load.scale, load.seconds, load.judged_after, turns=turns)


def _requests(given: Given) -> Load:
    after = given.judged_after
    if after is None:
        after = min(60.0, given.seconds / 4.0) if given.shape == "steady" else 0.0
    if given.shape == "steady":
        return Load(f"x{given.scale:g}", given.scale, given.seconds, after)
    if given.low >= given.scale:
        raise InputError(f"--low {given.low:g} is not below --scale {given.scale:g}")
    name = f"{given.shape} from x{given.low:g} to x{given.scale:g}"
    changing = (
        steps((given.low, given.scale), STEP_S)
        if given.shape == "steps"
        else day(given.low, given.scale, DAY_S)
    )
    return Load(name, changing, given.seconds, after)


def over_load(given: Given, pair: Pair, rows: Sequence[Row], path: Path, console: Console) -> None:
    """Draw every arrangement at shares of the scale."""
    scales = [share * given.scale for share in PLOTTED]
    alone = [Load(f"x{scale:g}", scale, PLOTTED_S, PLOTTED_S / 4.0) for scale in scales]
    turns = given.turns
    loads = alone if turns is None else [_talks(load, turns) for load in alone]
    found = {
        each.name: [play(each, load, rows) for load in loads]
        for each in track(arrangements(pair), "Over load", console=console, transient=True)
    }
    draw(path, scales, found)
    console.print(f"The picture over load is in {path}.")


def read_pair(given: Given, rows: Sequence[Row]) -> Pair:
    """Both servers. Raises InputError unless there is exactly one source of them."""
    sources = [source for source in (given.curves, given.calibration, given.arm) if source]
    if len(sources) != 1:
        raise InputError(
            "name the servers by one of --curves base=FILE,spec=FILE, --calibration FILE, --arm NAME"
        )
    if given.turns is not None and given.calibration is not None:
        raise InputError(
            "--turns needs prefill apart from the step times, and a calibration has them in one: "
            "name the servers by --arm or --curves"
        )
    if given.turns is not None and given.arm is not None:
        arm_curves(given.arm)  # raises CurveError for an unknown one
        pair = own_prompts_pair(given.arm, rows, gpus=given.gpus)
        return for_prompts(pair, rows, given.turns)
    if given.arm is not None:
        speculative, baseline = arm_curves(given.arm)
        return Pair(
            speculative=speculative,
            baseline=baseline,
            contention=H200,
            gpus=given.gpus,
            prompt_tokens=0,
        )
    if given.calibration is not None:
        return _calibrated(given.calibration, given.gpus)
    files = dict(part.partition("=")[::2] for part in (given.curves or "").split(","))
    if not {"base", "spec"} <= set(files) <= ROLE_OF.keys():
        raise InputError("--curves names base=FILE,spec=FILE and may name adaptive=FILE")
    read = {name: read_curve(Path(path), ROLE_OF[name]) for name, path in files.items()}
    pair = Pair(
        speculative=read["spec"],
        baseline=read["base"],
        contention=_kept(read["spec"], read["base"]),
        gpus=given.gpus,
        adaptive=read.get("adaptive"),
    )
    return pair if given.turns is None else for_prompts(pair, rows, given.turns)


def _kept(speculative: ServiceCurve, baseline: ServiceCurve) -> Contention:
    """What the curves say of an overlap; the shares measured on an H200 where they say nothing."""
    named = speculative.kept_share, baseline.kept_share
    default = ServiceCurve(label="", source="", points=((1, 1.0),)).kept_share
    return H200 if named == (default, default) else Contention.constant(*named)


def _calibrated(path: Path, gpus: Gpus) -> Pair:
    try:
        found: Calibration = parse_calibration(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if found.curves is None:
        raise InputError(f"{path} has no curves: make it with loadtest fit, or name them")
    # A curve in the simulator has decode steps only: two tokens are the shortest answer with one.
    tokens = max(2.0, known_of(found).get("output_tokens", OUTPUT_TOKENS))
    speculative, baseline = (
        curve_from_levels(levels_of(curve), role.value, output_tokens=tokens)
        for role, curve in (
            (Role.SPECULATIVE, found.curves.speculative),
            (Role.BASELINE, found.curves.baseline),
        )
    )
    return Pair(
        speculative=speculative,
        baseline=baseline,
        contention=overlaps_of(found),
        gpus=gpus,
        prompt_tokens=0,
        output_tokens=round(tokens),
    )


def _title(pair: Pair, load: Load | Talks, given: Given) -> str:
    kept = "separate GPUs"
    if given.gpus == 1:
        points = pair.contention.points
        low = statistics.fmean(point.speculative_share for point in points)
        high = statistics.fmean(point.baseline_share for point in points)
        kept = f"one GPU, {low:.2f} and {high:.2f} of their speed in an overlap"
    return f"{load.name}, {load.seconds:g} s, judged after {load.judged_after:g} s; {kept}"
