"""Collect what the openai client receives, the same from a whole reply and from the chunks of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CollectedChoice:
    """Hold one choice, assembled by the client or by this module from its chunks.

    `calls`: name and arguments of each; `ids`: those of the calls. `scores`: the entries of a chat, or of a completion
    each token with its log probability, its alternatives and its offset.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list, compare=False)
    scores: list[Any] = field(default_factory=list)
    num_roles: int = 0
    ended: str | None = None

    def add(self, choice: Any) -> None:
        assert not (self.ended and choice.finish_reason), "a choice ends once"
        self.ended = choice.finish_reason or self.ended
        if hasattr(choice, "text"):
            self.text += choice.text
        else:
            self._add_message(choice.message if hasattr(choice, "message") else choice.delta)
        if choice.logprobs is not None:
            kept = choice.logprobs.model_dump()
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            self.scores += kept["content"] if "content" in kept else zip(*(kept[name] for name in names), strict=True)

    def _add_message(self, part: Any) -> None:
        reasoning = getattr(part, "reasoning_content", None)
        assert getattr(part, "reasoning", None) == reasoning
        self.num_roles += part.role is not None
        self.text += part.content or ""
        self.reasoning += reasoning or ""
        for call in part.tool_calls or []:
            if call.id:
                assert call.type == "function"
                self.ids.append(call.id)
                self.calls.append([call.function.name, ""])
            else:
                assert call.id is None
            self.calls[-1][1] += call.function.arguments or ""
            assert getattr(call, "index", None) in (None, len(self.calls) - 1)


def collected(answer: Any, stream: bool) -> tuple[list[CollectedChoice], dict[str, Any], set[Any]]:
    """Return the choices, the usage in the reply or in the last chunk, and the service tiers of all chunks."""
    choices: dict[int, CollectedChoice] = {}
    usage: dict[str, Any] = {}
    tiers = set()
    for reply in answer if stream else [answer]:
        usage = {} if reply.usage is None else reply.usage.model_dump()
        tiers.add(getattr(reply, "service_tier", None))
        for choice in reply.choices:
            choices.setdefault(choice.index, CollectedChoice()).add(choice)
    return [choices[index] for index in sorted(choices)], usage, tiers
