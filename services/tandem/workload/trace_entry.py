"""Define one recorded request as a value, independent of the trace format, and generate its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.lane import Lane
from tandem.workload import seeded_random


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A recorded prompt of which only an id for each block is known; equal ids stand for equal tokens.

    `num_tokens`: length of the prompt. `ids`: ids of the prompt's blocks, in order. `size`: tokens of a block; the last
    one may be shorter. Raises ValueError unless there is one id for each block."""

    num_tokens: int
    ids: tuple[int, ...]
    size: int

    def __post_init__(self) -> None:
        needed = -(-self.num_tokens // self.size)
        if len(self.ids) != needed:
            raise ValueError(
                f"{self.num_tokens} tokens are {needed} blocks of {self.size}, but {len(self.ids)} are named"
            )


Prompt = int | PromptBlocks | tuple[int, ...]
"""What is known of a prompt: the number of its tokens, its blocks, or the tokens themselves."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """Describe one recorded request, independent of the trace's format.

    `due_us`: time of the request in microseconds, from any origin that all entries of the trace share. `prompt`: the
    number of its prompt's tokens, the prompt's blocks, or its tokens, as far as the trace has them.
    `num_output_tokens`: tokens to generate. `group`: class of the request in reports; `tenant`: its tenant; both are
    empty if the trace does not state them. `priority`: requests with a lower number run first in their `lane`."""

    due_us: int
    prompt: Prompt
    num_output_tokens: int
    group: str = ""
    tenant: str = ""
    priority: int = 0
    lane: Lane = Lane.INTERACTIVE

    def tokens(self, seed: int, number: int, salt: str) -> tuple[int, ...]:
        """Return the tokens of the prompt, generating those that the trace does not contain.

        `number`: number of the entry in the trace. Tokens of a block are a function of `seed`, `salt` and the id of the
        block. If the trace has no block ids, tokens are a function of `seed`, `salt` and `number`. So two blocks have
        the same tokens only if their ids are equal."""
        match self.prompt:
            case int():
                return seeded_random.tokens(self.prompt, seed, "request", number, salt)
            case PromptBlocks(num_tokens, ids, size):
                generated: list[int] = []
                for index, block in enumerate(ids):
                    generated += seeded_random.tokens(min(size, num_tokens - index * size), seed, "block", block, salt)
                return tuple(generated)
            case tuple():
                return self.prompt
