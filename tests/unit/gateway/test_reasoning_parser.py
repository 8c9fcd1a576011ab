"""Test that reasoning is separated from the answer however the text is cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest

from tandem.gateway.output.reasoning_parser import ReasoningParser
from tests.unit.gateway.test_tool_call_parser import cuts


def parts(pieces: Iterable[str], *, is_open: bool) -> tuple[str, str]:
    reader = ReasoningParser(is_open=is_open)
    parsed = [reader.push(piece) for piece in pieces]
    parsed.append(reader.finish())
    return "".join(thought for thought, _ in parsed), "".join(answer for _, answer in parsed)


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "answer"),
    [
        ("<think>\nHm.\n\nYes.\n</think>\n\nParis", False, "Hm.\n\nYes.", "Paris"),
        ("\nHm </thin </think>Paris </think>", True, "Hm </thin", "Paris </think>"),
        ("Paris", False, "", "Paris"),
        ("  <think></think> ", False, "", ""),
        ("\n<th", False, "", "\n<th"),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<think>never ends </thi", False, "never ends </thi", ""),
        ("", True, "", ""),
        ("", False, "", ""),
        ("<think>a</think>\n b", False, "a", "b"),
    ],
)
def test_thought_and_answer(text: str, is_open: bool, thought: str, answer: str) -> None:
    rng = random.Random(1)
    for _ in range(40):
        assert parts(cuts(text, rng), is_open=is_open) == (thought, answer)


def test_any_text() -> None:
    rng = random.Random(2)
    for _, is_open in itertools.product(range(800), (False, True)):
        text = "".join(
            rng.choices(["<think>", "</think>", "<thi", "nk>", "</", " ", "\n", "a", "é"], k=rng.randrange(9))
        )
        whole = parts([text], is_open=is_open)
        assert parts(cuts(text, rng), is_open=is_open) == whole, text
        assert parts(text, is_open=is_open) == whole, text
        assert "</think>" not in whole[0]
        assert text.endswith(whole[1])
