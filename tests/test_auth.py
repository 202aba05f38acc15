"""Who may come in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.auth import KeyRing, is_anthropic, load_keys
from tests.fake_relay import make_settings

KEYS = ("sk-first-key", "sk-second-key")
RING = KeyRing(KEYS)
ANTHROPIC = b"/v1/messages"


@pytest.mark.parametrize(
    ("headers", "path", "accepted"),
    [
        ([(b"authorization", b"Bearer sk-first-key")], b"", True),
        ([(b"Authorization", b"bearer sk-second-key")], b"", True),
        ([(b"AUTHORIZATION", b"BEARER   sk-second-key  ")], b"", True),
        ([(b"authorization", b"Bearer sk-first-ke")], b"", False),
        ([(b"authorization", b"Bearer sk-first-keyy")], b"", False),
        ([(b"authorization", b"Bearer")], b"", False),
        ([(b"authorization", b"Bearer ")], b"", False),
        ([(b"authorization", b"sk-first-key")], b"", False),
        ([(b"authorization", b"Basic sk-first-key")], b"", False),
        ([(b"authorization", b"Bearer sk-first-key")] * 2, b"", False),
        ([], b"", False),
        ([(b"x-api-key", b"sk-first-key")], b"/v1/chat/completions", False),
        ([(b"x-api-key", b"sk-first-key")], ANTHROPIC, True),
        ([(b"X-Api-Key", b"sk-first-key")], b"/messages/count_tokens", True),
        ([(b"x-api-key", b"sk-first-key")] * 2, ANTHROPIC, False),
        ([(b"x-api-key", b"wrong-key")], ANTHROPIC, False),
        ([(b"x-api-key", b"")], ANTHROPIC, False),
        (
            [(b"x-api-key", b"sk-first-key"), (b"authorization", b"Bearer wrong")],
            ANTHROPIC,
            False,
        ),
        ([(b"authorization", b"Bearer sk-first-key"), (b"x-api-key", b"x")], ANTHROPIC, True),
    ],
)
def test_which_headers_carry_a_right_key(
    headers: list[tuple[bytes, bytes]], path: bytes, accepted: bool
) -> None:
    """One Bearer header, or one x-api-key on Anthropic's routes when there is no Bearer."""
    assert RING.accepts(headers, path=path) is accepted


def test_a_ring_without_keys_is_open() -> None:
    """No key configured means that everyone may come in."""
    assert KeyRing(()).accepts([])
    assert len(KeyRing(())) == 0


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match with the first key does not end the comparison, so its time tells nothing."""
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr("router.auth.hmac.compare_digest", compare)
    assert RING.accepts([(b"authorization", b"Bearer sk-first-key")])
    assert len(compared) == 2


@given(st.binary(max_size=80))
def test_only_the_keys_themselves_are_accepted(value: bytes) -> None:
    """No other bytes are taken for a key, whatever they are."""
    given_key = value.strip(b" \t").decode("latin-1")
    headers = [(b"authorization", b"Bearer " + value)]
    assert RING.accepts(headers) is (given_key in KEYS)


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60))
def test_a_configured_key_opens(key: str) -> None:
    """Any key of visible ASCII characters works in both headers."""
    ring = KeyRing([key, "another-key"])
    assert ring.accepts([(b"authorization", b"Bearer " + key.encode())])
    assert ring.accepts([(b"x-api-key", key.encode())], path=ANTHROPIC)


def test_no_key_is_shown() -> None:
    """A ring's repr and its attributes hold no key in clear."""
    assert repr(RING) == "KeyRing(2 keys)"
    assert "sk-first-key" not in repr([getattr(RING, name) for name in RING.__slots__])


def test_only_the_routes_of_messages_are_anthropic() -> None:
    """A path that merely begins alike is not one of them."""
    assert is_anthropic(b"/v1/messages/count_tokens")
    assert is_anthropic(b"/v1/messages/")
    assert not is_anthropic(b"/v1/messagesX")
    assert not is_anthropic(b"/v1/models")


def test_keys_come_from_the_settings_and_their_file(tmp_path: Path) -> None:
    """Keys of the environment and of the file are both in the ring."""
    file = tmp_path / "keys.txt"
    file.write_text("# one on a line\nsk-from-the-file\n")
    ring = load_keys(make_settings(api_keys="sk-one-key, sk-two-key", api_keys_file=str(file)))
    assert len(ring) == 3
    assert ring.accepts([(b"authorization", b"Bearer sk-from-the-file")])
    assert len(load_keys(make_settings())) == 0
