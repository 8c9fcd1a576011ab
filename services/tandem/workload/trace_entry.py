"""Define one recorded request as a value, independent of the trace format, and generate its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.lane import Lane
from tandem.workload import seeded_random


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A recorded prompt of which only an id for each block is known; equal ids stand for equal tokens.

    `num_tokens`: length of the prompt. `ids`: one for each block. `size`: tokens of a block; the last one may be
    shorter. Raises ValueError unless there is one id for each block.
    """

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
    """One recorded request, independent of the trace's format.

    `due_us`: its time in microseconds, since any origin that is common to the trace. `prompt`: what is known of its
    prompt. `num_output_tokens`: tokens to generate. `group`: its class in reports, and `tenant`; both empty where the
    trace has none. `priority`: lower runs first in its `lane`."""

    due_us: int
    prompt: Prompt
    num_output_tokens: int
    group: str = ""
    tenant: str = ""
    priority: int = 0
    lane: Lane = Lane.INTERACTIVE

    def tokens(self, seed: int, number: int, salt: str) -> tuple[int, ...]:
        """Return the tokens of the prompt, generating those that the trace does not contain.

        `number`: number of the entry in the trace. Generated tokens are a function of `seed`, `salt` and the id of
        their block or, without block ids, of `number`, so only blocks of equal id are equal."""
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
