"""One recorded request as a value, whatever the format of its trace, and the prompt that stands for it; never reads a
file."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.lane import Lane
from tandem.workload import seeded_random


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """A prompt of which only the names of its blocks are known, `size` tokens each, the last of as many as are left.
    Equal ids stand for equal tokens. Raises ValueError unless there is one for each block."""

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
"""How much is known: the number of its tokens, its blocks, or the tokens themselves."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """`due_us`: microseconds since any moment that is the same for a whole trace. `group` is empty where a trace names
    none."""

    due_us: int
    prompt: Prompt
    num_output_tokens: int
    group: str = ""
    tenant: str = ""
    priority: int = 0
    lane: Lane = Lane.INTERACTIVE

    @property
    def num_prompt_tokens(self) -> int:
        match self.prompt:
            case int():
                return self.prompt
            case PromptBlocks():
                return self.prompt.num_tokens
            case tuple():
                return len(self.prompt)

    def tokens(self, seed: int, number: int, salt: str) -> tuple[int, ...]:
        """Of the prompt. What it does not name is drawn, and shared with no other `number` of the trace."""
        match self.prompt:
            case int():
                return seeded_random.tokens(self.prompt, seed, "request", number, salt)
            case PromptBlocks(num_tokens, ids, size):
                drawn: list[int] = []
                for index, block in enumerate(ids):
                    drawn += seeded_random.tokens(min(size, num_tokens - index * size), seed, "block", block, salt)
                return tuple(drawn)
            case tuple():
                return self.prompt
