"""Record what the clients of simulated requests receive, and when, and how each request ends."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

from tandem.admission.tenant_quota_state import QuotaReservation
from tandem.core.errors import TandemError
from tandem.core.events import Finished, FinishReason, Token, TokenRun
from tandem.core.ids import RequestId, WorkerRef
from tandem.core.request import Request
from tandem.orchestration.commands import EndRequest
from tandem.orchestration.director import OpenRequest
from tandem.sim.kernel.event_queue import Actor, SimEventQueue
from tandem.workload import seeded_random
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


class Delivery:
    """Choose for each token how many seconds it takes from the gateway to its client; all values of `seconds_s` are
    equally likely.

    `seed` and the token determine the choice. Raises ValueError when `seconds_s` is empty or has a negative value. On a
    machine with busy cores, a client receives a token when its process is scheduled: up to several milliseconds later,
    which widens the gaps between tokens that it sees. A later token of a request may get an earlier arrival time;
    `ClientTrace` corrects that.
    """

    def __init__(self, seconds_s: Sequence[float], seed: int) -> None:
        if not seconds_s or min(seconds_s) < 0:
            raise ValueError(f"deliveries take seconds, not {seconds_s}")
        self._seconds = tuple(seconds_s)
        self._seed = seed

    def times(self, request: RequestId, first_index: int, sent: Sequence[float]) -> Sequence[float]:
        """Return the times at which consecutive tokens of a request reach its client.

        `first_index`: the index of the first of these tokens in the output. `sent`: the time at which each of them
        leaves the gateway.
        """
        if len(self._seconds) == 1:
            return sent if self._seconds[0] == 0 else [time + self._seconds[0] for time in sent]
        return [time + self.seconds(request, index) for index, time in enumerate(sent, first_index)]

    def seconds(self, request: RequestId, index: int) -> float:
        """Return how many seconds the token at `index` of a request's output takes to its client; always the same for
        this token."""
        if len(self._seconds) == 1:
            return self._seconds[0]
        return self._seconds[seeded_random.integer(0, len(self._seconds) - 1, self._seed, "delivery", request, index)]


Ended = Callable[[ClientTrace], None]


def ignore(*_: object) -> None:
    """Do nothing; the default of callbacks."""


@dataclass(slots=True)
class _Stream:
    open_request: OpenRequest
    trace: ClientTrace
    ended: Ended
    quota: QuotaReservation | None


class ClientStreams:
    """Record what each client of one gateway receives until its request ends.

    `delivered`: called with each token that `deliver` sends to a client; tokens that `deliver_run` sends and tokens of
    probes are left out. `computed`: called with each request whose prompt was computed, and the number of its prompt
    tokens that came from a prefix cache.
    """

    def __init__(self, agenda: SimEventQueue, party: Actor, delivery: Delivery) -> None:
        self.delivered: Callable[[Token], None] = ignore
        self.computed: Callable[[Request, int], None] = ignore
        self._agenda = agenda
        self._party = party
        self._delivery = delivery
        self._streams: dict[RequestId, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, open_request: OpenRequest, trace: ClientTrace, ended: Ended, quota: QuotaReservation | None) -> None:
        """Open the stream of an admitted request.

        `trace` records the times at which its client receives tokens. `ended` is called with `trace` once, at the end
        of the request, after `quota` has been settled."""
        if quota is not None:
            quota.watch(open_request.usage)
        self._streams[trace.id] = _Stream(open_request, trace, ended, quota)

    def traces(self) -> list[ClientTrace]:
        """Return the traces of the open requests."""
        return [stream.trace for stream in self._streams.values()]

    def workers(self, request: RequestId) -> Sequence[WorkerRef]:
        """Return the workers of an open request; empty where it has ended."""
        stream = self._streams.get(request)
        return () if stream is None else stream.open_request.state.workers()

    def deliver(self, token: Token, at: float) -> None:
        """Send one token, which leaves the gateway at the virtual time `at`."""
        stream = self._streams[token.key.request]
        if stream.open_request.fixed_placement is None:
            self.delivered(token)
        delay_s = self._delivery.seconds(token.key.request, token.index)
        stream.trace.deliver(token.token.id, at + delay_s)

    def deliver_run(self, run: TokenRun, times: array[float]) -> None:
        """Send consecutive tokens of one choice, which leave the gateway at `times`."""
        reached = self._delivery.times(run.key.request, run.first_index, times)
        self._streams[run.key.request].trace.deliver_all(run.ids, reached)

    def end(self, end: EndRequest) -> None:
        """End the stream of a request as `end` says.

        If the outcome is an error with a `__cause__`, which means that this program itself failed at the request, that
        exception is raised.
        """
        if isinstance(end.outcome, TandemError) and end.outcome.__cause__ is not None:
            raise end.outcome.__cause__
        stream = self._streams.pop(end.request)
        stream.trace.path = stream.open_request.state.path
        self.close(stream.trace, stream.ended, end.outcome, stream.quota)

    def close(
        self, trace: ClientTrace, ended: Ended, outcome: Finished | TandemError, quota: QuotaReservation | None
    ) -> None:
        """Settle `quota`, record in `trace` that the request has ended now with `outcome`, and call `ended` with the
        trace."""
        now = self._agenda.now
        if quota is not None:
            quota.close()
        trace.end(outcome, now)
        kind = "finished" if isinstance(outcome, Finished) else outcome.kind.value
        self._party.log.note(now, f"end {trace.id} {kind} {trace.path}")
        self._party.log.note_bytes(trace.token_times.tobytes())
        ended(trace)

    def check(self) -> None:
        """Raise AssertionError naming the requests that are open."""
        assert not self._streams, f"{len(self._streams)} requests have no end: {list(self._streams.values())[:3]}"
