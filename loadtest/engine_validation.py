"""Reading a request's fields as pydantic would: leniently, and with its words where it refuses.

Pure; every refusal is an exception.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadtest.engine_errors import Refusal, bad_json, invalid, missing

# Strings that pydantic takes for a boolean.
TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
FALSE = frozenset({"0", "off", "f", "false", "n", "no"})


def parse_object(path: str, body: bytes) -> Fields:
    """The body as fields, or the refusal that the real server sends."""
    if not body:
        raise invalid(path, [missing(("body",), None)])
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise invalid(path, [bad_json(body)]) from None
    if not isinstance(value, dict):
        problem = {
            "type": "model_attributes_type",
            "loc": ("body",),
            "msg": "Input should be a valid dictionary or object to extract fields from",
            "input": value,
        }
        raise invalid(path, [problem])
    return Fields(path, value)


class Fields:
    """The fields of one JSON object. Problems are collected and raised together by `check`."""

    def __init__(
        self, path: str, values: dict[str, Any], where: tuple[str, ...] = ("body",)
    ) -> None:
        self.path = path
        self.where = where
        self.values = values
        self.problems: list[dict[str, Any]] = []

    def check(self) -> None:
        """Refuse the request if a field had a problem."""
        if self.problems:
            raise self.refusal()

    def refusal(self) -> Refusal:
        """All problems as one answer."""
        return invalid(self.path, self.problems)

    def problem(self, kind: str, name: str, message: str) -> None:
        """Note that this field's value does not do."""
        self.problems.append(
            {
                "type": kind,
                "loc": (*self.where, name),
                "msg": message,
                "input": self.values[name],
            }
        )

    def integer(self, name: str) -> int | None:
        """A whole number; None if it is absent or null."""
        value = self.values.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                self.problem(
                    "int_parsing",
                    name,
                    "Input should be a valid integer, unable to parse string as an integer",
                )
                return None
        if isinstance(value, float):
            if value.is_integer():
                return int(value)
            self.problem(
                "int_from_float",
                name,
                "Input should be a valid integer, got a number with a fractional part",
            )
            return None
        self.problem("int_type", name, "Input should be a valid integer")
        return None

    def number(self, name: str) -> float | None:
        """A number; None if it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                self.problem(
                    "float_parsing",
                    name,
                    "Input should be a valid number, unable to parse string as a number",
                )
                return None
        self.problem("float_type", name, "Input should be a valid number")
        return None

    def boolean(self, name: str) -> bool:
        """A truth value; False if it is absent or null."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        if isinstance(value, (int, float)) and value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in TRUE | FALSE:
            return value.lower() in TRUE
        if isinstance(value, (int, float, str)):
            self.problem(
                "bool_parsing", name, "Input should be a valid boolean, unable to interpret input"
            )
        else:
            self.problem("bool_type", name, "Input should be a valid boolean")
        return False

    def string(self, name: str) -> str | None:
        """A text; None if it is absent or null."""
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return value
        self.problem("string_type", name, "Input should be a valid string")
        return None

    def listing(self, name: str) -> list[Any] | None:
        """A list; None if it is absent or null."""
        value = self.values.get(name)
        if value is None or isinstance(value, list):
            return value
        self.problem("list_type", name, "Input should be a valid list")
        return None

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; empty if it is absent or null."""
        value = self.values.get(name)
        if value is None or isinstance(value, dict):
            return value or {}
        self.problem("dict_type", name, "Input should be a valid dictionary")
        return {}
