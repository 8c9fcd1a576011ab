"""One request that the dispatch runs, as its front sees it; owns the queue of its tokens, decides nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from tandem.admission.usage_estimator import TokenUsage
from tandem.core.errors import TandemError
from tandem.core.events import Finished, PromptLogprobs, Token
from tandem.flow.phase_ledger import PhaseLedger
from tandem.flow.request_state import RequestState
from tandem.gateway.context.interfaces import QuotaEntry
from tandem.gateway.context.rate_limit_status import RateLimitStatus
from tandem.gateway.orchestration.event_queue import EventQueue
from tandem.routing.placement import Placement
from tandem.routing.prefix_accuracy import Prediction


class ActiveRequest:
    """A TokenStream over a life, with the `ledger` of its time. On its clock: `received_at`, when it was admitted;
    `moved_at`, when a worker last said something of it; `told_at`, when its client last had something new, first of all
    its admission.

    `was_begun`: a worker computes it, or has. `deadline` is the client's own, on the same clock; None: it has none.
    `prefill_s`: the least that its prompt takes. `predicted`: what of its prompt is where, until who computes it has
    said what was. `fixed_placement` names the workers of a probe, which is not routed. The queue
    is bounded by the request's choices and `max_tokens`.
    """

    def __init__(
        self,
        life: RequestState,
        ledger: PhaseLedger,
        now: float,
        on_close: Callable[[ActiveRequest], None],
        on_finish: Callable[[ActiveRequest, int], None],
    ) -> None:
        self.life = life
        self.ledger = ledger
        self.received_at = self.moved_at = self.told_at = now
        self.fixed_placement: Placement | None = None
        self.deadline: float | None = None
        self.prefill_s = 0.0
        self.predicted: Sequence[Prediction] = ()
        self.quota: QuotaEntry | None = None
        self.was_begun = False
        self._on_close = on_close
        self._on_finish = on_finish
        self._events = EventQueue()
        self._open = set(range(life.request.num_choices))

    @property
    def path(self) -> str:
        return self.life.path

    @property
    def num_attempts(self) -> int:
        return 1 + self.life.num_moves

    @property
    def workers(self) -> Sequence[str]:
        placement = self.life.placement
        return () if placement is None else tuple(dict.fromkeys((placement.prefill.id, placement.decode.id)))

    @property
    def reasons(self) -> Mapping[str, object]:
        return self.life.placement.reasons if self.life.placement is not None else {}

    @property
    def has_more(self) -> bool:
        return any(map(self._is_wanted, self._events))

    def push(self, event: Token | PromptLogprobs | Finished | TandemError) -> None:
        self.was_begun = self.was_begun or isinstance(event, Token | Finished)
        self._events.push(event)

    def keep_time(self, now: float) -> None:
        """Its ledger follows its life."""
        phase = self.life.attempts.ledger_phase
        if phase is not self.ledger.phase:
            self.ledger.move(phase, now)

    def take_predicted(self) -> Sequence[Prediction]:
        """`predicted`, once."""
        predicted, self.predicted = self.predicted, ()
        return predicted

    def spent(self) -> TokenUsage | None:
        """A Meter. How much of a prompt an end before the first token left uncomputed nobody knows: all of it
        counts."""
        if not self.was_begun:
            return None
        return TokenUsage(len(self.life.request.prompt_tokens) - (self.life.num_cached or 0), self.life.num_delivered)

    @property
    def standing(self) -> RateLimitStatus:
        return RateLimitStatus() if self.quota is None else self.quota.standing

    async def __aiter__(self) -> AsyncIterator[Token | PromptLogprobs | Finished]:
        while self._open:
            event = await self._events.next()
            if isinstance(event, TandemError):
                self._open.clear()
                raise event
            if not self._is_wanted(event):
                continue
            if isinstance(event, Finished):
                self._open.discard(event.key.choice)
            yield event

    def _is_wanted(self, event: Token | PromptLogprobs | Finished | TandemError) -> bool:
        """Not of a choice that has ended, or that the client has enough of."""
        return not isinstance(event, Token | Finished) or event.key.choice in self._open

    def finish(self, choice: int) -> None:
        self._open.discard(choice)
        self._on_finish(self, choice)

    async def aclose(self) -> None:
        self._on_close(self)

    def __repr__(self) -> str:
        return f"<active {self.life!r}>"
