"""What the client of one simulated request sees and when; never what a worker did for it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise

from tandem.core.errors import TandemError
from tandem.core.events import Finished, FinishReason
from tandem.workload.ask import ScheduledRequest


class ClientTrace:
    """Times are virtual seconds. `path`: as `Placement.path`. It does not keep the request, whose prompt is most of
    what a simulation holds, and token ids only where a next turn needs them."""

    __slots__ = (
        "due_s", "ended_at", "group", "id", "max_tokens", "num_prompt", "outcome", "path", "tenant", "token_times",
        "tokens",
    )  # fmt: skip

    def __init__(self, ask: ScheduledRequest) -> None:
        self.id = ask.request.id
        self.group = ask.group
        self.tenant = ask.tenant
        self.due_s = ask.due_s
        self.num_prompt = len(ask.request.prompt_tokens)
        self.max_tokens = ask.request.sampling.max_tokens
        self.token_times = array("d")
        self.tokens: array[int] | None = None if ask.follow is None else array("L")
        self.outcome: Finished | TandemError | None = None
        self.ended_at = 0.0
        self.path = ""

    def deliver(self, token: int, at: float) -> None:
        """A token reaches the client, never before the one that came before it."""
        self.token_times.append(max(at, self.token_times[-1]) if self.token_times else at)
        if self.tokens is not None:
            self.tokens.append(token)

    def deliver_all(self, tokens: Sequence[int], times: Sequence[float]) -> None:
        """Several, as `deliver` takes one."""
        last = self.token_times[-1] if self.token_times else times[0]
        self.token_times.extend(islice(accumulate(times, max, initial=last), 1, None))
        if self.tokens is not None:
            self.tokens.extend(iter(tokens))

    def end(self, outcome: Finished | TandemError, now: float) -> None:
        """The one end. Raises RuntimeError at a second one."""
        if self.outcome is not None:
            raise RuntimeError(f"{self.id} ended twice: {self.outcome}, then {outcome}")
        self.outcome = outcome
        self.ended_at = max(now, self.token_times[-1]) if self.token_times else now

    @property
    def told_at(self) -> float:
        """When the last token came; 0 before the first."""
        return self.token_times[-1] if self.token_times else 0.0

    @property
    def is_complete(self) -> bool:
        """It ended well and all its tokens have come."""
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
