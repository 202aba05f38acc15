"""What the dashboard's JSON asks of Prometheus, with Grafana's variables filled in as Grafana does.

Pure: it reads the JSON as a value. The test and the picture both go by it, so what they run is what
a browser would.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

Board = dict[str, Any]
Panel = dict[str, Any]

_VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")
# A metric's name: nothing else in our queries has one of these beginnings.
_METRIC: Final = re.compile(r"\b(?:crossover_|sglang:|process_)\w+|\bALERTS\b")


class Query(NamedTuple):
    """One query of a panel, or of an annotation."""

    panel: str  # its title
    ref: str
    expr: str  # as it is in the JSON
    legend: str
    instant: bool

    @property
    def name(self) -> str:
        """How a test and a log call it."""
        return f"{self.panel} [{self.ref}]"


def panels(board: Board) -> list[Panel]:
    """The panels with queries, rows left out, in their order."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries(panel: Panel) -> Iterator[Query]:
    """A panel's queries."""
    for target in panel["targets"]:
        yield Query(
            panel["title"],
            target["refId"],
            target["expr"],
            target.get("legendFormat", ""),
            bool(target.get("instant")),
        )


def all_queries(board: Board) -> list[Query]:
    """Those of all panels, then those of the annotations."""
    events = board["annotations"]["list"]
    return [
        *(query for panel in panels(board) for query in queries(panel)),
        *(Query(event["name"], "annotation", event["expr"], "", False) for event in events),
    ]


def metrics(expr: str) -> set[str]:
    """The names of the metrics in a query."""
    return set(_METRIC.findall(expr))


def fill(expr: str, *, rate_interval: str, **variables: str) -> str:
    """The query as it is sent. Raises ValueError for a variable that nobody gave a value."""
    values = {"__rate_interval": rate_interval, "router": ".*", "engine": ".*", **variables}

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(f"${match[1]} has no value: {expr}")
        return values[match[1]]

    return _VARIABLE.sub(value, expr)


def shown(legend: str, labels: dict[str, str]) -> str:
    """A series' name: its legend with the values of labels."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), legend)
