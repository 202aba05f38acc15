"""Closed sets of names that say what each of them means.

Pure. A member is its name, as any `StrEnum`'s is: the label of a metric, the word in a header or a
log line. Its `meaning` is what REFERENCE.md says of it, so a name and its explanation cannot part.
"""

from __future__ import annotations

import enum
from typing import Self


class Explained(enum.StrEnum):
    """A set whose members are written as `NAME = "name", "what it means"`."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Self:
        """A member; `meaning` is a phrase without a full stop. None is without one: a test says so.

        It has a default because `Reason("band")`, which looks a member up, reads as this call.
        """
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member
