"""Prompts and lengths: what is asked, and that it is the same for both and new each time."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.prompts import (
    INSTRUCTIONS,
    TEXTS,
    Corpus,
    Lengths,
    Listed,
    Place,
    PromptError,
    Tokenizer,
    corpus_lines,
    described,
    mark,
    read_prompts,
    read_trace,
)

WORDS = Tokenizer(1.0, 2.0)  # a token is a word, as the simulated server has it


def test_the_texts_are_real_and_some_tens_of_kilobytes() -> None:
    """The shipped texts are there, one paragraph a line, and without the traces of a book's page."""
    texts = {name: corpus_lines(name) for name in (*TEXTS, "questions")}
    size = sum(len(line) for lines in texts.values() for line in lines)
    assert 40_000 < size < 100_000
    for lines in texts.values():
        assert len(lines) >= 40
        assert all(line == " ".join(line.split()) for line in lines)
    assert texts["alice"][0].startswith("Alice was beginning to get very tired")


@given(st.integers(30, 3000), st.integers(0, 500), st.integers(0, 9))
def test_a_prompt_has_the_tokens_asked_for(tokens: int, at: int, seed: int) -> None:
    """With its mark a prompt is of the length asked for, to the word."""
    place = Place(1, "8", at)
    prompt = mark(Corpus(seed, WORDS, marked=True).text(place, tokens), place, "abc")
    assert len(prompt.split()) == tokens


@pytest.mark.parametrize(("tokens", "words"), [(1, 1), (2, 1), (5, 3), (12, 10)])
def test_a_short_prompt_is_a_passage(tokens: int, words: int) -> None:
    """Where an instruction would not fit there is none, and a prompt is never empty."""
    prompt = Corpus(0, WORDS, marked=True).text(Place(1, "8", 0), tokens)
    assert len(prompt.split()) == words
    assert not prompt.startswith(INSTRUCTIONS)


def test_tokens_of_another_tokenizer() -> None:
    """Where a word has two tokens, half as many words are asked."""
    prompt = Corpus(0, Tokenizer(2.0, 20.0), marked=True).text(Place(1, "8", 0), 220)
    assert len(prompt.split()) == 100
    unmarked = Corpus(0, Tokenizer(2.0, 20.0), marked=False).text(Place(1, "8", 0), 220)
    assert len(unmarked.split()) == 110


def test_without_a_length_questions_and_passages_take_turns() -> None:
    """Unasked, prompts are as people's: every other one a plain question."""
    corpus = Corpus(0, WORDS, marked=True)
    prompts = [corpus.text(Place(1, "8", at), None) for at in range(20)]
    questions = corpus_lines("questions")
    assert [prompt in questions for prompt in prompts] == [False, True] * 10
    assert all(prompt.startswith(INSTRUCTIONS) for prompt in prompts[::2])


def test_both_servers_are_asked_the_same_and_passes_are_not() -> None:
    """A prompt depends on seed, pass, level and number, and on nothing else."""
    prompts = [
        Corpus(seed, WORDS, marked=True).text(Place(number, step, 0), 300)
        for seed, number, step in ((0, 1, "8"), (0, 1, "8"), (1, 1, "8"), (0, 2, "8"), (0, 1, "9"))
    ]
    assert prompts[0] == prompts[1]
    assert len(set(prompts)) == 4


def test_marks_are_unique() -> None:
    """No two places, and no two starts, have the same beginning."""
    places = [Place(n, s, at) for n in (1, 2) for s in ("1", "12", "r2") for at in range(50)]
    marks = {mark("", place, salt) for place in places for salt in ("aa", "bb")}
    assert len(marks) == 2 * len(places)


def test_a_file_of_lines(tmp_path: Path) -> None:
    """Plain lines are prompts as they stand, empty ones are none."""
    path = tmp_path / "p.txt"
    path.write_text('Why?\n\n"To be", he said, "or not"\n  Because. \n', encoding="utf-8")
    assert read_prompts(path) == ["Why?", '"To be", he said, "or not"', "  Because. "]


def test_a_file_of_json_lines(tmp_path: Path) -> None:
    """A line of JSON is a string, or has the prompt in a field that data sets use."""
    path = tmp_path / "p.jsonl"
    objects = ["a\nb", {"prompt": "c"}, {"id": 1, "turns": ["d", "e"]}, {"text": "f"}]
    path.write_text("\n".join(map(json.dumps, objects)), encoding="utf-8")
    assert read_prompts(path) == ["a\nb", "c", "d", "f"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no prompts"),
        (b"\n \n", "has no prompts"),
        (b'good\n{"prompt": }', "line 2: no JSON"),
        (b'{"answer": "x"}', "line 1: no text in any of prompt"),
        (b'{"turns": []}', "no text in any of"),
        (b'{"prompt": 3}', "no text in any of"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes, words: str) -> None:
    """A bad file is refused with its name, the line and what is wrong."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptError, match=words) as raised:
        read_prompts(path)
    assert "bad.jsonl" in str(raised.value)
    with pytest.raises(PromptError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "none")


def test_listed_prompts_go_round() -> None:
    """A file's prompts come in order, from a place that depends on the level."""
    listed = Listed(["a", "b", "c"], seed=0)
    got = "".join(listed.text(Place(1, "8", at), None) for at in range(6))
    assert got in {"abcabc", "bcabca", "cabcab"}
    firsts = {listed.text(Place(1, str(level), 0), None) for level in range(20)}
    assert firsts == {"a", "b", "c"}


def trace(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("TIMESTAMP", "ContextTokens", "GeneratedTokens"), *rows])
    return path


def test_a_trace(tmp_path: Path) -> None:
    """Lengths come from the trace; what does not fit in the context is left out."""
    path = trace(
        tmp_path / "t.csv",
        [("2023-11-16 18:17:03.9799600", "374", "44"), ("x", "4000", "109"), ("x", "9", "0")],
    )
    assert read_trace(path) == [(374, 44), (4000, 109)]
    assert read_trace(path, 2000) == [(374, 44)]
    with pytest.raises(PromptError, match="no request that fits in 100 tokens"):
        read_trace(path, 100)
    assert described(path).startswith("t.csv (")


def test_a_trace_that_is_none(tmp_path: Path) -> None:
    """A file without the columns, or with words for numbers, is refused."""
    (tmp_path / "a.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(PromptError, match="must name ContextTokens and GeneratedTokens"):
        read_trace(tmp_path / "a.csv")
    with pytest.raises(PromptError, match="line 2: ContextTokens and GeneratedTokens are numbers"):
        read_trace(trace(tmp_path / "b.csv", [("x", "many", "1")]))
    with pytest.raises(PromptError, match="has no request"):
        read_trace(trace(tmp_path / "c.csv", []))


def test_lengths() -> None:
    """What is given leads over the trace; a trace is gone through in order, round and round."""
    place = Place(1, "8", 0)
    assert Lengths(128).of(place) == (None, 128)
    assert Lengths(128, input_tokens=50).of(place) == (50, 128)
    rows = [(10, 1), (20, 2), (30, 3)]
    lengths = Lengths(None, rows)
    got = [lengths.of(Place(1, "8", at)) for at in range(6)]
    assert got[:3] == got[3:]
    assert sorted(got[:3]) == rows
    assert {Lengths(7, rows).of(Place(1, "8", at))[1] for at in range(3)} == {7}
    assert {Lengths(None, rows, 7).of(Place(1, "8", at))[0] for at in range(3)} == {7}
    with pytest.raises(PromptError, match="--output-tokens or --trace"):
        Lengths(None)
