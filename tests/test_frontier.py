"""The line: its shapes, its values, its band."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router.frontier import Frontier, below_band

INF = math.inf
whole = st.integers(0, 300).map(float)
values = whole | st.just(INF) | st.floats(0.0, 300.0)
tables = st.builds(
    lambda line, falls: tuple(sorted(line, reverse=falls)),
    st.lists(values, min_size=1, max_size=12),
    st.booleans(),
)
lines = (
    st.builds(Frontier.total, values)
    | st.builds(Frontier.speculative_only, values)
    | st.builds(Frontier.from_table, tables)
)
# Bands as people write them: hundredths.
bands = st.integers(0, 99).map(lambda percent: percent / 100)


# ---------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("line", "m", "expected"),
    [
        (Frontier.total(8), 0, 8),
        (Frontier.total(8), 3, 5),
        (Frontier.total(8), 7, 1),
        (Frontier.total(8), 8, 0),
        (Frontier.total(8), 900, 0),
        (Frontier.total(0), 0, 0),
        (Frontier.total(INF), 10**9, INF),
        (Frontier.speculative_only(8), 0, 8),
        (Frontier.speculative_only(8), 900, 8),
        (Frontier.speculative_only(INF), 900, INF),
        (Frontier.from_table((8, 4, 1)), 0, 8),
        (Frontier.from_table((8, 4, 1)), 1, 4),
        (Frontier.from_table((8, 4, 1)), 2, 1),
        (Frontier.from_table((8, 4, 1)), 99, 1),
        (Frontier.from_table((8, 4, 1)), 0.5, 6),
        (Frontier.from_table((1, 4)), 0.25, 1.75),
        (Frontier.from_table((5,)), 99, 5),
        (Frontier.from_table((5, INF)), 0, 5),
        (Frontier.from_table((5, INF)), 0.5, INF),
        (Frontier.from_table((INF, 5)), 0.5, INF),  # not undefined
        (Frontier.from_table((INF, 5)), 1, 5),
        (Frontier.from_table((INF, INF)), 0.5, INF),
    ],
)
def test_values_of_each_shape(line: Frontier, m: float, expected: float) -> None:
    """F(m) is K - m, K, or the table's value, straight between whole m and constant at the end."""
    assert line.at(m) == expected


@pytest.mark.parametrize(
    ("line", "never", "always"),
    [
        (Frontier.total(0), True, False),
        (Frontier.total(0.9), True, False),  # no whole request fits
        (Frontier.total(1), False, False),
        (Frontier.total(INF), False, True),
        (Frontier.speculative_only(0), True, False),
        (Frontier.speculative_only(INF), False, True),
        (Frontier.from_table((0, 0)), True, False),
        (Frontier.from_table((0, 1)), False, False),
        (Frontier.from_table((5, 0)), False, False),
        (Frontier.from_table((5, INF)), False, False),
        (Frontier.from_table((INF, INF)), False, True),
    ],
)
def test_never_and_always(line: Frontier, never: bool, always: bool) -> None:
    """A line is never when it is zero everywhere, and always when it is infinite everywhere."""
    assert (line.never, line.always) == (never, always)


@pytest.mark.parametrize(
    ("crossover", "most"),
    [(0.0, 0), (0.99, 0), (1.0, 1), (1.5, 1), (2.5, 2), (11.999, 11), (12.0, 12), (60.4, 60)],
)
@pytest.mark.parametrize("shape", [Frontier.total, Frontier.speculative_only])
def test_a_fractional_crossover_is_rounded_down(
    shape: Callable[[float], Frontier], crossover: float, most: int
) -> None:
    """Of arrivals one after another as many run as whole requests fit under the crossover."""
    line = shape(crossover)
    running = 0
    while running < line.at(0):
        running += 1
    assert running == most == line.threshold


def test_a_tables_fractions_are_rounded_down() -> None:
    """A table of one value is the same line as that number."""
    assert Frontier.from_table((2.5, 1.2)).table == (2.0, 1.0)
    assert Frontier.from_table((0.9, 0.1)).never


@pytest.mark.parametrize(
    ("scope", "threshold", "table", "why"),
    [
        ("total", -1.0, (), "negative or undefined"),
        ("total", math.nan, (), "negative or undefined"),
        ("speculative", -0.001, (), "negative or undefined"),
        ("speculative", -INF, (), "negative or undefined"),
        ("table", 0.0, (), "at least one value"),
        ("table", 5.0, (), "at least one value"),
        ("table", 0.0, (1.0, -1.0), "negative or undefined"),
        ("table", 0.0, (1.0, math.nan), "negative or undefined"),
        ("table", 0.0, (1.0, 2.0, 1.0), "never rises or never falls"),
        ("table", 0.0, (2.0, 1.0, 1.0, 2.0), "never rises or never falls"),
        ("table", 0.0, (INF, 1.0, INF), "never rises or never falls"),
        ("table", 0.0, (0.0, INF, 0.0), "never rises or never falls"),
    ],
)
def test_what_is_no_line_cannot_be_built(
    scope: str, threshold: float, table: tuple[float, ...], why: str
) -> None:
    """A negative, undefined, empty or zigzag line is refused, and the text says which it is."""
    with pytest.raises(ValueError, match=why):
        Frontier(scope, threshold, table)  # type: ignore[arg-type]


def test_a_line_is_frozen() -> None:
    """A line cannot change under the decisions made with it."""
    with pytest.raises(AttributeError):
        Frontier.total(8).threshold = 9.0  # type: ignore[misc]


def test_a_line_is_also_checked_when_decoded() -> None:
    """A line that comes from JSON is held to the same rules."""
    with pytest.raises(msgspec.ValidationError, match="negative"):
        msgspec.json.decode(b'{"scope":"total","threshold":-1}', type=Frontier)


@given(line=lines, low=st.floats(0.0, 400.0), more=st.floats(0.0, 400.0))
@settings(deadline=None)
def test_a_line_never_turns(line: Frontier, low: float, more: float) -> None:
    """F is never negative or undefined, and over all m it either never rises or never falls."""
    a, b = line.at(low), line.at(low + more)
    assert a >= 0
    assert b >= 0
    falls = line.scope == "total" or line.at(0) >= line.at(1e9)
    assert a >= b - 1e-6 if falls else a <= b + 1e-6


@given(line=lines, m=st.integers(0, 400))
@settings(deadline=None)
def test_at_whole_m_a_line_is_whole(line: Frontier, m: int) -> None:
    """For the counts that decisions are made on, F(m) is the number of requests that may run."""
    value = line.at(m)
    assert value == INF or value == int(value)


@given(k=values, n=st.integers(0, 300), m=st.integers(0, 300))
@settings(deadline=None)
def test_scope_total_compares_the_total(k: float, n: int, m: int) -> None:
    """Under F(m) is where the total n + m is under K, for K rounded down."""
    line = Frontier.total(k)
    assert (n < line.at(m)) is (n + m < line.threshold)


@given(k=whole | st.just(INF), n=st.integers(0, 60), m=st.integers(0, 60), band=bands)
@settings(deadline=None)
def test_a_table_can_be_either_number(k: float, n: int, m: int, band: float) -> None:
    """A constant table is scope speculative, and a table of K - m is scope total."""
    flat, number = Frontier.from_table((k,)), Frontier.speculative_only(k)
    assert flat.at(m) == number.at(m)
    assert flat.inside_band(n, m, band) is number.inside_band(n, m, band)
    if k >= 100:  # a table of so many values says nothing new
        return
    slope = Frontier.from_table(tuple(k - i for i in range(int(k) + 1)))
    total = Frontier.total(k)
    assert slope.at(m) == total.at(m)
    assert slope.inside_band(n, m, band) is total.inside_band(n, m, band)


# ---------------------------------------------------------------------- the band


@pytest.mark.parametrize(
    ("k", "band", "edge"),
    [
        (10, 0.1, 9),
        (10, 0.3, 7),
        (10, 0.7, 3),  # in floats 10 x (1 - 0.7) is above 3
        (20, 0.35, 13),
        (8, 0.25, 6),
        (100, 0.01, 99),
        (1, 0.2, 0.8),
        (8, 0.2, 6.4),
        (8, 0.0, 8),
    ],
)
def test_the_edge_of_the_band_is_not_below_it(k: float, band: float, edge: float) -> None:
    """A load is below the band when it is below K x (1 - band), as on paper."""
    below = [load for load in range(int(k) + 2) if below_band(load, k, band)]
    assert below == [load for load in range(int(k) + 2) if load < edge]


@given(k=st.integers(0, 300), n=st.integers(0, 300), m=st.integers(0, 300), p=st.integers(0, 99))
@settings(deadline=None)
def test_the_band_is_exact(k: int, n: int, m: int, p: int) -> None:
    """For both numbers, whatever the split, (n, m) is in the band as exact arithmetic says."""
    edge = Fraction(k * (100 - p), 100)
    assert Frontier.total(k).inside_band(n, m, p / 100) is (n + m < edge)
    assert Frontier.speculative_only(k).inside_band(n, m, p / 100) is (n < edge)


@given(line=lines, n=st.integers(0, 400), m=st.integers(0, 400))
@settings(deadline=None)
def test_without_a_band_the_way_back_is_the_line(line: Frontier, n: int, m: int) -> None:
    """With a band of 0 a point is inside it exactly when it is below the line."""
    assert line.inside_band(n, m, 0.0) is (n < line.at(m))


@given(line=lines, n=st.integers(0, 400), m=st.integers(0, 400), band=bands)
@settings(deadline=None)
def test_inside_the_band_is_below_a_line_that_falls(
    line: Frontier, n: int, m: int, band: float
) -> None:
    """Where the line does not rise, no point is inside the band and not below the line."""
    assume(line.scope != "table" or line.table[0] >= line.table[-1])
    if line.inside_band(n, m, band):
        assert n < line.at(m)


@given(line=lines, n=st.integers(0, 400), m=st.integers(0, 400), a=bands, b=bands)
@settings(deadline=None)
def test_a_wider_band_asks_for_more(line: Frontier, n: int, m: int, a: float, b: float) -> None:
    """Where the line does not rise, what is inside a wide band is inside a narrower one."""
    assume(line.scope != "table" or line.table[0] >= line.table[-1])
    if line.inside_band(n, m, max(a, b)):
        assert line.inside_band(n, m, min(a, b))


@pytest.mark.parametrize(
    ("n", "m", "inside"),
    [
        (0, 0, True),
        (7, 0, True),  # 8.75 < 10
        (8, 0, False),  # 10 is not below F(0) = 10
        (5, 2, True),  # 6.25 < F(2.5) = 7
        (6, 2, False),  # 7.5 is not
        (2, 4, True),  # 2.5 < F(5) = 4
        (4, 4, False),  # 5 is not
        (3, 100, False),  # 3.75 is not below the last value, 3
        (2, 100, True),
    ],
)
def test_the_band_of_a_table_is_the_line_drawn_nearer(n: int, m: int, inside: bool) -> None:
    """Inside the band of a table is what, divided by 1 - band, is below the table's line."""
    line = Frontier.from_table((10, 9, 8, 6, 5, 4, 3))
    assert line.inside_band(n, m, 0.2) is inside


def test_beside_infinity_the_band_is_defined() -> None:
    """Between an infinite and a finite value of a table the band neither shuts nor is undefined."""
    line = Frontier.from_table((INF, INF, 5))
    assert line.inside_band(1000, 1, 0.2)  # m / 0.8 = 1.25
    assert not line.inside_band(4, 2, 0.2)
    assert line.inside_band(3, 2, 0.2)
