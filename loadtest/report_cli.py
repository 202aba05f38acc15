"""The command `loadtest report`: a calibration file in, a page and a picture out. Others draw."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from loadtest.exit_codes import BAD_VALUE


def report(
    calibration: Annotated[Path, typer.Argument(help="The file that `loadtest fit` wrote.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; the picture goes beside it (default: beside the file)."),
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(help="Request records: where each request found the pair, in the plane."),
    ] = None,
    no_png: Annotated[bool, typer.Option("--no-png", help="The page only.")] = False,
) -> None:
    """Draw a calibration: an HTML page that needs no network, and a PNG.

    Exit code 0: written. 2: an input cannot be used, or matplotlib is missing.
    """
    from loadtest.plot import PlotError
    from loadtest.record import RecordError, read_records
    from loadtest.report import report_html
    from loadtest.report_png import write_png
    from router.calibration import CalibrationError, parse_calibration

    page = calibration.with_suffix(".html") if out is None else out
    try:
        found = parse_calibration(calibration.read_bytes())
        samples = [
            (float(record.n), float(record.m))
            for record in (read_records(arrivals) if arrivals is not None else ())
            if record.n is not None and record.m is not None
        ]
        page.write_text(report_html(found, samples), encoding="utf-8")
        print(f"written: {page}")
        if not no_png:
            write_png(found, page.with_suffix(".png"), samples)
            print(f"written: {page.with_suffix('.png')}")
    except OSError as error:
        print(f"loadtest: {error.filename}: {error.strerror}", file=sys.stderr)
        raise typer.Exit(BAD_VALUE) from error
    except CalibrationError as error:
        print(f"loadtest: {calibration}: {error}", file=sys.stderr)
        raise typer.Exit(BAD_VALUE) from error
    except (RecordError, PlotError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        raise typer.Exit(BAD_VALUE) from error
