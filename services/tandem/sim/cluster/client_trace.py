"""Record what the client of one simulated request receives, and when."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise

from tandem.core.errors import TandemError
from tandem.core.events import Finished, FinishReason
from tandem.workload.scheduled_request import ScheduledRequest


class ClientTrace:
    """Record when the client of one simulated request receives its tokens, and how the request ends.

    Times are virtual seconds. `token_times`: when each token arrived. `tokens`: the ids of the tokens, kept only where
    the client's next turn needs them; None otherwise. `path`: how the request was served, as in `RequestState.path`.
    The request itself is not kept, because prompts are most of a simulation's memory.
    """

    __slots__ = (
        "due_s", "ended_at", "group", "id", "max_tokens", "num_prompt", "outcome", "path", "tenant", "token_times",
        "tokens",
    )  # fmt: skip

    def __init__(self, scheduled: ScheduledRequest) -> None:
        self.id = scheduled.request.id
        self.group = scheduled.group
        self.tenant = scheduled.tenant
        self.due_s = scheduled.due_s
        self.num_prompt = len(scheduled.request.prompt_tokens)
        self.max_tokens = scheduled.request.sampling.max_tokens
        self.token_times = array("d")
        self.tokens: array[int] | None = None if scheduled.follow is None else array("L")
        self.outcome: Finished | TandemError | None = None
        self.ended_at = 0.0
        self.path = ""

    def deliver(self, token: int, at: float) -> None:
        """Record a token that reaches the client at `at`, or at the time of the token before it if that is later."""
        self.token_times.append(max(at, self.token_times[-1]) if self.token_times else at)
        if self.tokens is not None:
            self.tokens.append(token)

    def deliver_all(self, tokens: Sequence[int], times: Sequence[float]) -> None:
        """Record several tokens, each as `deliver` does."""
        last = self.token_times[-1] if self.token_times else times[0]
        self.token_times.extend(islice(accumulate(times, max, initial=last), 1, None))
        if self.tokens is not None:
            self.tokens.extend(iter(tokens))

    def end(self, outcome: Finished | TandemError, now: float) -> None:
        """Record the end of the request. Raises RuntimeError when it has already ended."""
        if self.outcome is not None:
            raise RuntimeError(f"{self.id} ended twice: {self.outcome}, then {outcome}")
        self.outcome = outcome
        self.ended_at = max(now, self.token_times[-1]) if self.token_times else now

    @property
    def is_complete(self) -> bool:
        """Return whether the request finished without error and the client has all its tokens."""
        outcome = self.outcome
        if not isinstance(outcome, Finished) or outcome.num_output_tokens != len(self.token_times):
            return False
        return outcome.reason is FinishReason.STOP or len(self.token_times) == self.max_tokens

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times)]
