"""Track what the client of one request has received: prompt log probabilities, tokens and ends of its choices."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from dataclasses import replace

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, FinishReason, PromptLogprobs, Token
from tandem.core.ids import JobKey
from tandem.core.request import Request, SamplingParams


class Choice:
    """Hold the output tokens and the end of one choice, in the order in which the client gets them.

    `tokens`: the ids of the tokens that the client has, after which any worker can continue. `finished`: the end as its
    worker reported it; None before the report. Tokens that arrive ahead of the next index are kept until the gap is
    filled, and an end is held back until all the tokens that it counts have arrived.
    """

    __slots__ = ("_early", "finished", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self._early: dict[int, Token] = {}
        self.finished: Finished | None = None

    @property
    def next_index(self) -> int:
        return len(self.tokens)

    def take(self, token: Token) -> None:
        """Keep a token until `due` returns it; ignore a token whose index the client already has.

        Some tokens arrive twice: in a hand-off both workers report the first token, and in a migration both workers
        report several.
        """
        if token.index >= len(self.tokens):
            self._early[token.index] = token

    def due(self) -> list[Token]:
        """Return the tokens that the client gets next, in order, and add their ids to `tokens`. The list is empty while
        the token with the next index has not arrived."""
        out: list[Token] = []
        while (token := self._early.pop(len(self.tokens), None)) is not None:
            out.append(token)
            self.tokens.append(token.token.id)
        return out

    def skip(self, first_index: int, ids: Iterable[int]) -> bool:
        """Add the ids of tokens that the client gets at once to `tokens`, without `take` and `due`, and return True.
        `ids`: ids of the consecutive tokens from index `first_index` on. Returns False, and changes nothing, if
        `first_index` is not the next index, or if later tokens or the end are held back."""
        if self._early or self.finished is not None or first_index != len(self.tokens):
            return False
        self.tokens.extend(iter(ids))
        return True

    @property
    def end(self) -> Finished | None:
        """Return the worker's report that the choice has ended, once the client has all output tokens of the choice;
        None before."""
        finished = self.finished
        return finished if finished is not None and len(self.tokens) >= finished.num_output_tokens else None

    def last_word(self, sampling: SamplingParams) -> FinishReason | None:
        """Return why the output is complete with the tokens that the client has: STOP where the last one is a stop
        token of `sampling`, LENGTH where `max_tokens` (if above 0) is reached. None where the output is not complete.

        Needed when a worker was lost after it sent the last token of a choice and before it reported the end: another
        worker must not sample one more token.
        """
        if self.tokens and self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if 0 < sampling.max_tokens <= len(self.tokens) else None

    def restart(self) -> None:
        """Drop the tokens and the end that have arrived but that the client does not have, because another attempt
        samples the same tokens again."""
        self._early.clear()
        self.finished = None


class ClientState:
    """Decide which tokens and ends of choices the client of one request gets next: in order, and each once.

    `choices`: the choices that have not ended, by index. `num_cached`: number of prompt tokens whose KV came from a
    prefix cache, as reported by the first attempt that sampled a token; None before.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.choices = {index: Choice() for index in range(request.num_choices)}
        self.num_cached: int | None = None
        self._num_ended_tokens = 0
        # Prompt tokens from the second on.
        self._num_scored = 0
        self._num_to_score = 0 if request.prompt_logprobs is None else len(request.prompt_tokens) - 1

    @property
    def num_tokens(self) -> int:
        """Return the number of output tokens that the client has, over all choices, including those that have ended."""
        return self._num_ended_tokens + self.num_open_tokens

    @property
    def num_open_tokens(self) -> int:
        """Return the number of output tokens that the client has of the choices that have not ended."""
        return sum(choice.next_index for choice in self.choices.values())

    @property
    def is_scored(self) -> bool:
        """Return whether all requested prompt log probabilities have arrived."""
        return self._num_scored >= self._num_to_score

    def take_scores(self, event: PromptLogprobs) -> PromptLogprobs | None:
        """Return the prompt log probabilities of the event that the client does not have yet; None when it has all of
        them.

        Raises TandemError(INTERNAL) when the event begins after the first position that the client lacks, so that
        positions in between are missing.
        """
        num_known = self._num_scored + 1 - event.first_index
        if num_known < 0:
            raise TandemError(ErrorKind.INTERNAL, f"{-num_known} scores of the prompt are missing")
        fresh = event.tokens[num_known:]
        if not fresh:
            return None
        self._num_scored += len(fresh)
        return PromptLogprobs(event.key, self._num_scored + 1 - len(fresh), fresh)

    def due(self, index: int) -> tuple[list[Token], Finished | None]:
        """Return (tokens, end): the tokens of the choice `index` that the client gets next, in order, and the report
        that the choice has ended. The end is None until all tokens before it are due.

        Nothing is due before all requested prompt log probabilities have arrived. They may arrive after the first
        tokens when another worker than the decode worker computed the prompt.
        """
        if not self.is_scored:
            return [], None
        choice = self.choices[index]
        due = choice.due()
        if self.num_cached is None and due:
            self.num_cached = due[0].num_cached_tokens
        end = choice.end
        if end is None:
            return due, None
        if self.num_cached is None:
            self.num_cached = end.num_cached_tokens
        return due, replace(end, num_cached_tokens=self.num_cached)

    def restart(self, choices: Collection[int], attempt: int) -> list[int]:
        """Drop the tokens and ends of `choices` that have arrived but that the client does not have, so that another
        attempt can continue the choices.

        Returns the choices whose last token the client already has and whose end alone was lost. Each of them gets a
        new `Finished` event with the attempt number `attempt`, which `due` returns.
        """
        ended: list[int] = []
        for index in sorted(choices):
            choice = self.choices[index]
            choice.restart()
            reason = choice.last_word(self._request.sampling)
            if reason is not None:
                key = JobKey(self._request.id, attempt, index)
                choice.finished = Finished(key, reason, choice.next_index, self.num_cached or 0)
                ended.append(index)
        return ended

    def close(self, index: int) -> None:
        """Remove a choice that has ended or that the client needs no more."""
        self._num_ended_tokens += self.choices.pop(index).next_index
