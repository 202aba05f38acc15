"""The `loadtest` command: one line per subcommand, which lives in a module of its own.

It names the commands and turns a bad value into one line; it runs nothing itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from loadtest.bench import bench
from loadtest.calibrate_cli import calibrate
from loadtest.compare_cli import compare
from loadtest.demo_cli import demo
from loadtest.engine_cli import engine
from loadtest.exit_codes import BAD_VALUE, INTERRUPTED, OK
from loadtest.fit_cli import ManyFiles, fit
from loadtest.overhead_cli import overhead
from loadtest.report_cli import report
from loadtest.scale import scale
from loadtest.sweep_cli import sweep

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("bench")(bench)
app.command("calibrate")(calibrate)
app.command("compare")(compare)
app.command("demo")(demo)
app.command("engine")(engine)
app.command("overhead")(overhead)
app.command("scale")(scale)
app.command("sweep")(sweep)
app.command("fit", cls=ManyFiles)(fit)
app.command("report")(report)


@app.callback()
def root() -> None:
    """Load on a pair of servers, real or simulated."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code. A bad value is one line that says what and how to mend it.

    Without any argument the help is shown, and the exit code is 2, as for `crossover`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(given or ["--help"], prog_name="loadtest", standalone_mode=False)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        command = "loadtest" if context is None else context.command_path
        print(f"loadtest: {error.format_message()} (see `{command} --help`)", file=sys.stderr)
        return BAD_VALUE
    except typer.Abort:
        return INTERRUPTED
    if not given:
        return BAD_VALUE
    return code if isinstance(code, int) else OK


if __name__ == "__main__":
    sys.exit(main())
