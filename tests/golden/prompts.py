"""Prompts of the real model's golden tests: 3 to 3,000 tokens of plain text, without a chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

_LICENSE = (Path(__file__).parents[2] / "LICENSE").read_text()

SHORT = (
    "The capital of France is",
    "Hello, my",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Erkläre in zwei Sätzen, warum der Himmel blau ist.\n",
    "La inteligencia artificial es",
    "Le petit prince regarda la rose et dit :",
    "今日は天気がいいので、",
    "人工智能的未来是",
    "Москва — столица",
    "مرحبا، كيف",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
    '{"name": "Ada", "born": 1815, "langu',
    "SELECT name, count(*) FROM users WHERE",
    "for (int i = 0; i < n; i++) {\n    sum +=",
    "Q: What is 17 times 3?\nA:",
    "😀 😃 😄 😁 😆 😅 🤣",
    "<html>\n<head>\n  <title>",
    "\t\tif err != nil {\n\t\t\treturn nil,",
)
_LENGTHS = (64, 150, 300, 590, 700, 1500, 3000)
"""Tokens; three of them are over 600."""


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids, shortest text first; the long ones are pieces of a licence, each from another place."""
    short = [tokenizer.encode(text).ids for text in SHORT]
    words = tokenizer.encode(_LICENSE * 2).ids
    long = [words[37 * i : 37 * i + length] for i, length in enumerate(_LENGTHS)]
    return sorted([*short, *long], key=len)
