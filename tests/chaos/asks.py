"""What clients ask while faults strike: requests of every kind, drawn by a seed, and what of an answer must be equal;
never sends one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from tests.e2e.gateway.http import prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
DRAWN = {"temperature": 1.0, "top_p": 0.95}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": DRAWN,
    "penalties": {**DRAWN, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "choices": {**DRAWN, "n": 3},
    "form": {**DRAWN, "response_format": FORM},
    "form in choices": {**DRAWN, "n": 2, "structured_outputs": {"regex": "([a-z]{3,9} ){20,40}"}},
    "logprobs": {**DRAWN, "logprobs": 3},
    "echo": {"temperature": 0, "echo": True, "logprobs": 1},
}
LONGEST_PROMPT, LONGEST_ANSWER = 3000, 160
NUM_DOCUMENTS, DOCUMENT_TOKENS = 3, 256
TOLERANCE = 1e-6
"""Of log probabilities in float64, which differ in the last bits with the company in a step."""


@dataclass(frozen=True, slots=True)
class Ask:
    """`body` is of a completion, without `stream`; `name` says what kind it is and which."""

    name: str
    body: dict[str, Any]
    over_grpc: bool

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))


def draw_asks(seed: int, number: int) -> list[Ask]:
    """Every kind in turn; prompts short to long, some of which begin alike, answers of one token to many."""
    draws = random.Random(f"asks {seed}")
    return [_draw(draws, seed, index) for index in range(number)]


def _draw(draws: random.Random, seed: int, index: int) -> Ask:
    kind = list(KINDS)[index % len(KINDS)]
    longest = LONGEST_PROMPT if kind != "echo" else 300
    length = int(math.exp(draws.uniform(math.log(4), math.log(longest))))
    tokens = prompt(length, 9_000_000 + 1000 * seed + index)
    if draws.random() < 0.5:
        tokens = prompt(DOCUMENT_TOKENS, 8_000_000 + draws.randrange(NUM_DOCUMENTS)) + tokens
    body = {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": draws.choice([1, 8, 40, LONGEST_ANSWER]),
        "seed": draws.randrange(1 << 31),
        "return_token_ids": True,
        **KINDS[kind],
    }
    return Ask(f"{index} {kind}", body, kind in ("greedy", "drawn", "choices") and draws.random() < 0.4)


@dataclass(slots=True)
class Answered:
    """One choice, whole or put together from what was streamed."""

    tokens: list[int]
    logprobs: list[float | None]
    top: list[dict[str, float] | None]
    reason: str | None = None

    @classmethod
    def empty(cls) -> Answered:
        return cls([], [], [])

    def add(self, choice: dict[str, Any]) -> None:
        """A choice of an answer, or of an event of a stream."""
        self.tokens += choice.get("token_ids") or []
        if (told := choice.get("logprobs")) is not None:
            self.logprobs += told["token_logprobs"]
            self.top += told["top_logprobs"]
        self.reason = choice["finish_reason"] or self.reason

    def differs(self, other: Answered) -> str | None:
        """None, or the first thing that is not equal."""
        if self.tokens != other.tokens:
            at = next(
                (i for i, pair in enumerate(zip(self.tokens, other.tokens, strict=False)) if len(set(pair)) > 1), None
            )
            where = f"differ at {at}" if at is not None else "are not as many"
            return f"tokens {where}: {len(self.tokens)} against {len(other.tokens)}"
        if self.reason != other.reason:
            return f"ended with {self.reason} instead of {other.reason}"
        if len(self.logprobs) != len(other.logprobs) or not all(map(_near, self.logprobs, other.logprobs)):
            return "log probabilities differ"
        tops = zip(self.top, other.top, strict=True)
        if not all((a or {}).keys() == (b or {}).keys() and all(_near(a[k], b[k]) for k in a or {}) for a, b in tops):  # type: ignore[index]
            return "alternatives differ"
        return None


def _near(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and abs(one - other) < TOLERANCE)
