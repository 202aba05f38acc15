"""What holds for every case: nothing was thrown and lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_lost_exception(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No traceback, and no task whose exception nobody retrieved, is in any log."""
    yield
    records = caplog.get_records("call")
    assert [r.getMessage() for r in records if r.exc_info or "never retrieved" in r.msg] == []
