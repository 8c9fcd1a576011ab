"""Generate random completion requests of every kind from a seed, and compare two answers to one request."""

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
SAMPLED = {"temperature": 1.0, "top_p": 0.95}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": SAMPLED,
    "penalties": {**SAMPLED, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "choices": {**SAMPLED, "n": 3},
    "form": {**SAMPLED, "response_format": FORM},
    "form in choices": {**SAMPLED, "n": 2, "structured_outputs": {"regex": "([a-z]{3,9} ){20,40}"}},
    "logprobs": {**SAMPLED, "logprobs": 3},
    "echo": {"temperature": 0, "echo": True, "logprobs": 1},
}
LONGEST_PROMPT, LONGEST_ANSWER = 3000, 160
NUM_DOCUMENTS, DOCUMENT_TOKENS = 3, 256
TOLERANCE = 1e-6
"""Tolerance of log probabilities in float64, whose last bits depend on the other sequences of a step."""


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """`body` is of a completion, without `stream`; `name` says what kind it is and which."""

    name: str
    body: dict[str, Any]
    over_grpc: bool

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))


def random_requests(seed: int, number: int) -> list[ChaosRequest]:
    """Return `number` requests with every kind in turn, prompts short to long, some with equal prefixes, and
    answers of one token to many."""
    rng = random.Random(f"asks {seed}")
    return [_random_request(rng, seed, index) for index in range(number)]


def _random_request(rng: random.Random, seed: int, index: int) -> ChaosRequest:
    kind = list(KINDS)[index % len(KINDS)]
    longest = LONGEST_PROMPT if kind != "echo" else 300
    length = int(math.exp(rng.uniform(math.log(4), math.log(longest))))
    tokens = prompt(length, 9_000_000 + 1000 * seed + index)
    if rng.random() < 0.5:
        tokens = prompt(DOCUMENT_TOKENS, 8_000_000 + rng.randrange(NUM_DOCUMENTS)) + tokens
    body = {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": rng.choice([1, 8, 40, LONGEST_ANSWER]),
        "seed": rng.randrange(1 << 31),
        "return_token_ids": True,
        **KINDS[kind],
    }
    return ChaosRequest(f"{index} {kind}", body, kind in ("greedy", "drawn", "choices") and rng.random() < 0.4)


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
        if (logprobs := choice.get("logprobs")) is not None:
            self.logprobs += logprobs["token_logprobs"]
            self.top += logprobs["top_logprobs"]
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
