"""The two pictures of a calibration as SVG: the curves, and the plane with its line.

Pure: a calibration in, text out. Colours are names of CSS variables that the page defines, for
light and for dark. Every number that goes into the text is formatted here, and every text escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from router.calibration import Calibration
from router.curves import Crossover, Curve, Number

WIDTH: Final = 760
HEIGHT: Final = 400
LEFT, RIGHT, TOP, BOTTOM = 64, 110, 16, 44
STEPS: Final = 240  # pieces that the line is drawn in
PLANE: Final = 430  # side of the plane's picture
COLOURS: Final = {"speculative": "var(--spec)", "baseline": "var(--base)"}


class Scale(msgspec.Struct, frozen=True):
    """From a value to a place in the picture; logarithmic or straight."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    def __call__(self, value: float) -> float:
        """Pixels; values outside are held at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + (self.end - self.start) * share, 2)

    def ticks(self) -> list[float]:
        """Round numbers inside, few enough to be read."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if self.high / self.low < 3000 else (1,)
            found = [step * 10.0**power for power in powers for step in steps]
        else:
            rough = (self.high - self.low) / 5
            unit = 10 ** math.floor(math.log10(rough))
            step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
            found = [step * i for i in range(int(self.high / step) + 1)]
        return [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]


def curves_svg(calibration: Calibration) -> str:
    """Both curves with bands and measurements, and the crossover with its interval."""
    curves = calibration.curves
    if curves is None or not curves.speculative.points or not curves.baseline.points:
        return ""
    both = {"speculative": curves.speculative, "baseline": curves.baseline}
    levels = [p.concurrency for curve in both.values() for p in curve.points]
    speeds = [s for curve in both.values() for s in _speeds(curve)]
    x = Scale(min(levels) / 1.1, max(levels) * 1.1, LEFT, WIDTH - RIGHT)
    y = Scale(min(speeds) / 1.15, max(speeds) * 1.15, HEIGHT - BOTTOM, TOP)
    found = calibration.objectives.get("throughput")
    parts = [
        *_axes(x, y, HEIGHT, "requests in flight", "output tokens/s"),
        *_crossing(found, x, y),
    ]
    for role, curve in both.items():
        parts += _curve(role, curve, x, y)
    ends = {role: y(curve.points[-1].tokens_per_second) for role, curve in both.items()}
    upper, lower = sorted(ends, key=ends.__getitem__)
    ends[lower] = max(ends[lower], ends[upper] + 16)  # two labels never lie on each other
    parts += [
        f'<text x="{WIDTH - RIGHT + 8}" y="{ends[role] + 4:.1f}" fill="{COLOURS[role]}">{role}</text>'
        for role in both
    ]
    return _svg(WIDTH, HEIGHT, "Output tokens per second of both servers by concurrency", parts)


def plane_svg(calibration: Calibration, samples: Sequence[tuple[float, float]] = ()) -> str:
    """The plane of both concurrencies, the line, and where a load lived in it."""
    top = plane_top(calibration, samples)
    left, bottom = 56, PLANE - 44
    x = Scale(0, top, left, PLANE - 16, log=False)
    y = Scale(0, top, bottom, 16, log=False)
    edge = [(x(n), y(m)) for n, m in frontier_path(calibration, top)]
    inside = " ".join(f"{a},{b}" for a, b in [(x(0), y(0)), *edge, (x(0), edge[-1][1])])
    line = " ".join(f"{a},{b}" for a, b in edge)
    seen: dict[tuple[float, float], int] = {}
    for n, m in samples:
        seen[n, m] = seen.get((n, m), 0) + 1
    most = max(seen.values(), default=1)
    parts = [
        f'<polygon points="{inside}" fill="var(--spec)" fill-opacity="0.16"/>',
        *_axes(x, y, PLANE, "n, requests on the speculative server", "m, on the baseline", left),
        *(
            f'<circle cx="{x(n)}" cy="{y(m)}" r="{1.5 + 4 * math.sqrt(count / most):.1f}"'
            f' fill="var(--ink)" fill-opacity="0.35"><title>n {n:g}, m {m:g}: {count}</title></circle>'
            for (n, m), count in sorted(seen.items())
        ),
        f'<polyline points="{line}" fill="none" stroke="var(--spec)" stroke-width="2"/>',
    ]
    return _svg(PLANE, PLANE, "The plane of both concurrencies with the line", parts)


def plane_top(calibration: Calibration, samples: Iterable[tuple[float, float]] = ()) -> float:
    """How far the plane is drawn: past the line and every sample."""
    edge = max(frontier_at(calibration, 0.0), 0.0)
    seen = max((max(pair) for pair in samples), default=0.0)
    if not math.isfinite(edge) or edge == 0:
        points = calibration.curves.speculative.points if calibration.curves else ()
        edge = max((point.concurrency for point in points), default=32.0) / 1.5
    return max(4.0, 1.5 * edge, 1.05 * seen)


def frontier_at(calibration: Calibration, m: float) -> float:
    """F(m)."""
    return calibration.line.at(m)


def frontier_path(calibration: Calibration, top: float) -> list[tuple[float, float]]:
    """The line (F(m), m) within the picture, up to where it first reaches the axis."""
    path: list[tuple[float, float]] = []
    for step in range(STEPS + 1):
        m = top * step / STEPS
        n = frontier_at(calibration, m)
        path.append((min(n, top), m))
        if n == 0:
            break
    return path


def _speeds(curve: Curve) -> Iterator[float]:
    for point in curve.points:
        yield from (point.tokens_per_second, *point.measured)
        yield point.low if point.low is not None else point.tokens_per_second
        yield point.high if point.high is not None else point.tokens_per_second
    yield from (speed for _, speed in curve.left_out)


def _curve(role: str, curve: Curve, x: Scale, y: Scale) -> Iterator[str]:
    colour = COLOURS[role]
    low = [(p.concurrency, p.tokens_per_second if p.low is None else p.low) for p in curve.points]
    high = [
        (p.concurrency, p.tokens_per_second if p.high is None else p.high) for p in curve.points
    ]
    band = " ".join(f"{x(n)},{y(speed)}" for n, speed in [*high, *reversed(low)])
    line = " ".join(f"{x(p.concurrency)},{y(p.tokens_per_second)}" for p in curve.points)
    yield f'<polygon points="{band}" fill="{colour}" fill-opacity="0.18"/>'
    yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for point in curve.points:
        for speed in point.measured:
            yield (
                f'<circle cx="{x(point.concurrency)}" cy="{y(speed)}" r="2.6" fill="{colour}">'
                f"<title>{role}, {point.concurrency:g} requests: {speed:.0f} tok/s</title></circle>"
            )
    for level, speed in curve.left_out:
        a, b = x(level), y(speed)
        yield (
            f'<path d="M{a - 4},{b - 4}L{a + 4},{b + 4}M{a - 4},{b + 4}L{a + 4},{b - 4}"'
            f' stroke="{colour}" stroke-width="1.6"><title>{role}, {level:g} requests:'
            f" {speed:.0f} tok/s, left out</title></path>"
        )


def _crossing(found: Crossover | None, x: Scale, y: Scale) -> Iterator[str]:
    if found is None or found.interval is None:
        return
    low, high = (_place(end, x) for end in found.interval)
    yield (
        f'<rect x="{low}" y="{y.end}" width="{max(1.0, high - low):.2f}"'
        f' height="{y.start - y.end}" fill="var(--ink)" fill-opacity="0.07"/>'
    )
    if not isinstance(found.crossover, str) and found.crossover > 0:
        at = x(found.crossover)
        yield (
            f'<line x1="{at}" x2="{at}" y1="{y.end}" y2="{y.start}" stroke="var(--ink)"'
            ' stroke-dasharray="4 3"/>'
        )
        yield (
            f'<text x="{at + 5}" y="{y.start - 8}" fill="var(--ink)">'
            f"crossover {found.crossover:.1f}</text>"
        )


def _place(end: Number, x: Scale) -> float:
    return x(x.high if isinstance(end, str) else end)


def _axes(x: Scale, y: Scale, height: int, across: str, up: str, left: int = LEFT) -> Iterator[str]:
    for tick in y.ticks():
        yield f'<line x1="{x.start}" x2="{x.end}" y1="{y(tick)}" y2="{y(tick)}" class="grid"/>'
        yield f'<text x="{left - 6}" y="{y(tick) + 4}" class="tick" text-anchor="end">{tick:,.6g}</text>'
    for tick in x.ticks():
        yield f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{y.start}" y2="{y.end}" class="grid"/>'
        yield (
            f'<text x="{x(tick)}" y="{y.start + 16}" class="tick" text-anchor="middle">'
            f"{tick:,.6g}</text>"
        )
    middle = (x.start + x.end) / 2
    yield f'<text x="{middle}" y="{height - 8}" class="tick" text-anchor="middle">{html.escape(across)}</text>'
    turn = (y.start + y.end) / 2
    yield (
        f'<text x="14" y="{turn}" class="tick" text-anchor="middle"'
        f' transform="rotate(-90 14 {turn})">{html.escape(up)}</text>'
    )


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img"'
        f' aria-label="{html.escape(title)}" xmlns="http://www.w3.org/2000/svg">'
        + "".join(parts)
        + "</svg>"
    )
