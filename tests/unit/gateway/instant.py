"""Answer every request at once, like a worker that always produces the same output, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.events import Finished, FinishReason, PromptLogprobs, SampledToken, Token
from tandem.core.ids import JobKey
from tandem.core.request import Request

END = 1
"""The end-of-sequence token of the tests' tokenizer."""
NUM_CACHED = 2
LOGPROB, PROMPT_LOGPROB = -0.5, -1.25
Event = Token | PromptLogprobs | Finished


def instant_events(request: Request, output_tokens: Sequence[int]) -> list[Event]:
    """Return the events of all choices: choice n is `output_tokens` after n copies of its first token, and the choices
    take turns token by token. Scores of the prompt arrive in two overlapping pieces. Output beyond `max_tokens` is
    cut off.
    """
    events: list[Event] = [*_scores(request)]
    plans = [[output_tokens[0]] * choice + [*output_tokens, END] for choice in range(request.num_choices)]
    limit = request.sampling.max_tokens
    outputs = [plan[:limit] for plan in plans]
    for index in range(max(map(len, outputs), default=0)):
        for choice, output in enumerate(outputs):
            if index < len(output):
                events.append(Token(_key(request, choice), index, _sampled(request, output[index])))
    for choice, (plan, output) in enumerate(zip(plans, outputs, strict=True)):
        reason = FinishReason.STOP if plan == output else FinishReason.LENGTH
        events.append(Finished(_key(request, choice), reason, len(output), NUM_CACHED))
    return events


def _key(request: Request, choice: int) -> JobKey:
    return JobKey(request.id, 1, choice)


def _sampled(request: Request, token: int) -> SampledToken:
    count = request.sampling.logprobs
    return SampledToken(token) if count is None else SampledToken(token, LOGPROB, _top(token, count, LOGPROB))


def _top(token: int, count: int, logprob: float) -> tuple[tuple[int, float], ...]:
    return tuple((token if rank == 0 else 100 + rank, logprob - rank) for rank in range(count))


def _scores(request: Request) -> list[PromptLogprobs]:
    count = request.prompt_logprobs
    if count is None:
        return []
    tokens = [
        SampledToken(token, PROMPT_LOGPROB, _top(token, count, PROMPT_LOGPROB)) for token in request.prompt_tokens
    ]
    cut = max(1, len(tokens) // 2)
    pieces = [PromptLogprobs(_key(request, 0), 1, tuple(tokens[1 : cut + 1]))]
    return [*pieces, PromptLogprobs(_key(request, 0), cut, tuple(tokens[cut:]))]
