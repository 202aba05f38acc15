"""A calibration as one page of HTML: the verdict, both pictures, tables, conditions.

Pure: a calibration in, text out. The page asks nothing of any network, has no script, and follows
the reader's light or dark setting. All text from the file is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from loadtest.fit_words import OBJECTIVES, describe_notes, line_words, sentence, top_level
from loadtest.report_svg import curves_svg, plane_svg
from router.calibration import Calibration
from router.curves import Point

NOTHING: Final = "\N{EN DASH}"
STYLE: Final = """
:root{color-scheme:light dark;--page:#fcfcfb;--ink:#1d1d1b;--soft:#6b6a66;--rule:#e2e1dc;
--spec:#2a6fdb;--base:#c2570c}
@media (prefers-color-scheme:dark){:root{--page:#1b1b1a;--ink:#ecebe6;--soft:#a3a29c;--rule:#383734;
--spec:#6ea8ff;--base:#f29a55}}
body{background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:820px;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}p{margin:.4rem 0}
.soft,.tick{color:var(--soft)}svg{max-width:100%;height:auto;font:12px system-ui,sans-serif}
.tick{fill:var(--soft)}.grid{stroke:var(--rule)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{border-bottom:1px solid var(--rule);padding:.2rem .7rem .2rem 0;text-align:right;
font-weight:normal;vertical-align:top}
th{color:var(--soft);font-size:.85rem}td:first-child,th:first-child{text-align:left}
.numbers td{white-space:nowrap}.words td,.words th{text-align:left;overflow-wrap:anywhere}
"""


def report_html(calibration: Calibration, samples: Sequence[tuple[float, float]] = ()) -> str:
    """The page. `samples` are pairs (n, m) of a load, to be shown in the plane."""
    return "".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>Crossover calibration: {_e(calibration.verdict or 'line')}</title>",
        f"<style>{STYLE}</style></head><body>",
        *_head(calibration),
        *_pictures(calibration, samples),
        *_objectives(calibration),
        *_levels(calibration),
        *_overlaps(calibration),
        *_words("Holds for", calibration.fingerprint),
        *_words("How it was measured", calibration.conditions),
        "</body></html>\n",
    ])  # fmt: skip


def _e(value: object) -> str:
    return html.escape(str(value))


def _head(calibration: Calibration) -> Iterator[str]:
    yield f"<h1>{_e(_capital(line_words(calibration)))}</h1>"
    main = calibration.objectives.get(calibration.objective or "")
    if main is not None:
        name = OBJECTIVES.get(calibration.objective or "", calibration.objective)
        said = sentence(main, top_level(calibration))
        yield f"<p>For {_e(name)}: {_e(said)}.</p>"
    for note in describe_notes(calibration):
        yield f"<p>{_e(_capital(note))}.</p>"
    made = " · ".join(filter(None, (calibration.created, calibration.command)))
    if made:
        yield f'<p class="soft">{_e(made)}</p>'


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _pictures(calibration: Calibration, samples: Sequence[tuple[float, float]]) -> Iterator[str]:
    curves = curves_svg(calibration)
    if curves:
        yield "<h2>Both curves</h2>"
        yield curves
        yield (
            '<p class="soft">Lines: smoothed, with 95 % bands. Dots: measurements; a cross was left'
            " out. Grey: the interval of the crossover.</p>"
        )
    yield "<h2>The plane and its line</h2>"
    yield plane_svg(calibration, samples)
    load = f" Dots: where {len(samples)} requests found the pair." if samples else ""
    yield f'<p class="soft">Shaded: a request goes to the speculative server.{load}</p>'


def _table(
    head: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "numbers"
) -> Iterator[str]:
    yield f'<div class="wide"><table class="{kind}">'
    cells = "".join(f"<th>{_e(cell)}</th>" for cell in head)
    yield f"<tr>{cells}</tr>" if cells else ""
    for row in rows:
        yield "<tr>"
        yield from (f"<td>{_e(cell)}</td>" for cell in row)
        yield "</tr>"
    yield "</table></div>"


def _objectives(calibration: Calibration) -> Iterator[str]:
    if calibration.objectives:
        yield "<h2>By objective</h2>"
        top = top_level(calibration)
        rows = [
            (OBJECTIVES.get(name, name), sentence(found, top))
            for name, found in calibration.objectives.items()
        ]
        yield from _table(("objective", "speculate"), rows, "words")


def _levels(calibration: Calibration) -> Iterator[str]:
    curves = calibration.curves
    if curves is None or not curves.speculative.points or not curves.baseline.points:
        return
    spec = {point.concurrency: point for point in curves.speculative.points}
    base = {point.concurrency: point for point in curves.baseline.points}
    yield "<h2>Levels</h2>"
    yield from _table(
        ("requests", "speculative tok/s", "baseline tok/s", "ratio", "accept length", "steps/s",
         "ms per token, s / b", "TTFT ms, s / b"),
        (
            _level(n, spec.get(n), base.get(n)) for n in sorted({*spec, *base})
        ),
    )  # fmt: skip


def _level(n: float, spec: Point | None, base: Point | None) -> list[str]:
    ratio = spec.tokens_per_second / base.tokens_per_second if spec and base else None
    return [
        f"{n:g}",
        _speed(spec),
        _speed(base),
        _figure(ratio, ".2f"),
        _figure(spec.accept_length if spec else None, ".2f"),
        _figure(spec.steps_per_second if spec else None, ".0f"),
        " / ".join(_ms(point.time_per_token if point else None, ".1f") for point in (spec, base)),
        " / ".join(_ms(point.ttft if point else None, ".0f") for point in (spec, base)),
    ]


def _speed(point: Point | None) -> str:
    if point is None:
        return NOTHING
    if point.low is None or point.high is None:
        return f"{point.tokens_per_second:.0f}"
    return f"{point.tokens_per_second:.0f} ({point.low:.0f} to {point.high:.0f})"


def _ms(seconds: float | None, form: str) -> str:
    return _figure(None if seconds is None else seconds * 1e3, form)


def _figure(value: float | None, form: str) -> str:
    return NOTHING if value is None or not math.isfinite(value) else format(value, form)


def _overlaps(calibration: Calibration) -> Iterator[str]:
    found = calibration.contention
    if found is not None and found.overlaps:
        yield f"<h2>Both servers at once ({_e(found.gpus)} GPUs): share of its own speed kept</h2>"
        yield from _table(
            ("n : m", "speculative", "baseline"),
            (
                (f"{o.n:g} : {o.m:g}", _figure(o.speculative, ".0%"), _figure(o.baseline, ".0%"))
                for o in found.overlaps
            ),
        )


def _words(
    title: str, found: dict[str, str] | dict[str, str | int | float | bool | None]
) -> Iterator[str]:
    if found:
        yield f"<h2>{_e(title)}</h2>"
        yield from _table((), (map(str, item) for item in found.items()), "words")
