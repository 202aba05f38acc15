"""What fuzzing has found, each as a test of its own."""

from __future__ import annotations

import pytest

from router.guard import path_of


@pytest.mark.parametrize("target", [b"http://host#", b"HTTPS://host#/v1/models", b"http://h#?x"])
def test_a_fragment_behind_an_authority_is_no_path(target: bytes) -> None:
    """A path begins with a slash, so `http://host#x` has none and is refused."""
    assert path_of(target) is None


@pytest.mark.parametrize(
    ("target", "path"),
    [(b"http://host", b"/"), (b"http://host?x=1", b"/"), (b"http://host/a?x#y", b"/a")],
)
def test_an_authority_is_dropped(target: bytes, path: bytes) -> None:
    """What is left of an absolute target without its authority and query is the path."""
    assert path_of(target) == path
