"""What a measurement says of itself while it goes on: a bar in a terminal, otherwise lines."""

from __future__ import annotations

from rich.console import Console

from loadtest.live_schema import Offered
from loadtest.live_schema import Turn as LiveTurn
from loadtest.overhead import Turn as OverheadTurn
from loadtest.overhead import Way
from loadtest.progress import Bars, shown
from loadtest.sweep_level import Progress
from loadtest.sweep_phases import Phase
from loadtest.sweep_turns import Step, Turn
from loadtest.sweep_view import outcome
from tests.sweeps import BASE, SPEC, point


def test_a_bar_in_a_terminal() -> None:
    """A terminal gets a bar with the phase, the answers and the failures, and a line for each part."""
    console = Console(force_terminal=True, width=150, color_system=None)
    with console.capture() as captured, shown(console) as show:
        assert isinstance(show, Bars)
        show.goes(Progress(Phase.WARM_UP, 0.0, 0, 0))
        show.begins("speculative, pass 2, level 8", 3, 12)
        show.goes(Progress(Phase.WINDOW, 0.5, 17, 2))
        show.ended("speculative, pass 2, level 8", "640 tok/s")
    text = captured.get()
    assert "speculative, pass 2, level 8: window, 17 answers, 2 failed" in text
    assert "speculative, pass 2, level 8: 640 tok/s" in text
    assert "3/12" in text
    assert "4/12" in text


def test_lines_where_no_terminal_is() -> None:
    """A pipe gets a line when a part begins and one when it has ended."""
    console = Console(force_terminal=False, width=150, color_system=None)
    with console.capture() as captured, shown(console) as show:
        show.begins("baseline, pass 1, level 8", 0, 4)
        show.goes(Progress(Phase.WINDOW, 0.5, 17, 2))
        show.ended("baseline, pass 1, level 8", "640 tok/s")
        show.say("[all] is well")
    assert captured.get().splitlines() == [
        "1 of 4: baseline, pass 1, level 8",
        "  640 tok/s",
        "[all] is well",
    ]


def test_a_part_has_a_title() -> None:
    """A title says which server, policy or way, and under which load."""
    assert Turn(2, Step(level=8), SPEC).title == "speculative, pass 2, level 8"
    assert Turn(1, Step(rate=2.5), BASE).title == "baseline, pass 1, 2.5 requests a second"
    assert LiveTurn(2, Offered(in_flight=8), "frontier").title == "frontier, pass 2, 8 in flight"
    assert OverheadTurn(3, Way.DIRECT).title == "direct, pair 3"


def test_a_point_in_a_line() -> None:
    """A level's figures, its accept length if there is one, and the codes of its notices."""
    words = "640 ±40 tok/s, first token 1000.0 ms, 1000.0 ms per token, 50 answers in 10.0 s"
    assert outcome(point(accept_length=None)) == words
    assert outcome(point(notices=("errors",))) == f"{words}, accept length 2.50 [errors]"
