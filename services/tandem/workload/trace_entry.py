"""Define one recorded request as a value, independent of the trace format, and generate its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.lane import Lane
from tandem.workload import seeded_random


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt of which only block ids are known, of `size` tokens each; the last block has the remaining tokens.

    Equal ids stand for equal tokens. Raises ValueError unless there is one id for each block.
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
    """One recorded request. `due_us`: microseconds since any origin that is common to the trace. `group` is empty where
    the trace has none."""

    due_us: int
    prompt: Prompt
    num_output_tokens: int
    group: str = ""
    tenant: str = ""
    priority: int = 0
    lane: Lane = Lane.INTERACTIVE

    def tokens(self, seed: int, number: int, salt: str) -> tuple[int, ...]:
        """Return the prompt's tokens. Unknown tokens are generated; unless `ids` names their block, no other `number`
        of the trace shares them."""
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
