"""What the fronts of the gateway need from what is behind them; owns no implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.admission.tenant import OPEN, Tenant
from tandem.admission.usage_estimator import TokenUsage
from tandem.core.events import Finished, PromptLogprobs, Token
from tandem.core.ids import BlockHash, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.gateway.context.rate_limit_status import RateLimitStatus
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.text.text_model import TextModel
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.orchestration.request_queue import Prefixes
from tandem.routing.circuit_breaker import BreakerState
from tandem.routing.prefix_accuracy import Prediction
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.worker_view import Pool


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that at least one worker serves, or did a moment ago. Clients may call it by an alias too; workers never
    do. `created` is in seconds since the epoch."""

    name: str
    max_model_len: int
    text: TextModel
    created: int
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class TokenStream(Protocol):
    """One admitted request. Iterating yields the tokens of each choice in order of index and one Finished for each
    choice, after which it ends; or raises TandemError. Scores of the prompt come before the first token. Leaving early
    must be told by `aclose`, which cancels the request everywhere."""

    @property
    def path(self) -> str:
        """`remote`, `local`, `local;reason=...` or `fallback;reason=...` once the first token was yielded; from then on
        only `;moves=...` may come to it, which counts how often the request went on elsewhere."""
        ...

    @property
    def num_attempts(self) -> int:
        """One more than its moves."""
        ...

    @property
    def workers(self) -> Sequence[str]:
        """Ids of those that it was placed at last, the one that computes its prompt first."""
        ...

    @property
    def reasons(self) -> Mapping[str, object]:
        """Why, with the numbers, for JSON; final once the first token was yielded. Empty while it has no place."""
        ...

    @property
    def standing(self) -> RateLimitStatus: ...

    @property
    def has_more(self) -> bool:
        """The next event is here already."""
        ...

    def __aiter__(self) -> AsyncIterator[Token | PromptLogprobs | Finished]: ...

    def finish(self, choice: int) -> None:
        """The client has enough of one choice; nothing more comes of it, not even its Finished."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """Where a worker's own metrics are: `address` is host:port."""

    address: str
    worker: WorkerId
    pool: Pool
    model: str


class RequestDispatcher(Protocol):
    """Admits and runs requests; the fronts are translators over it."""

    def models(self) -> Sequence[ServedModel]: ...

    def ready(self) -> str | None:
        """None when requests can be served, else what is missing."""
        ...

    def num_queued(self) -> Mapping[Lane, int]:
        """Requests that wait for a place, of all lanes."""
        ...

    def breakers(self) -> Mapping[WorkerId, BreakerState]:
        """Of the workers whose last jobs failed."""
        ...

    def problem(self) -> str | None:
        """What is wrong between workers; who is ready serves all the same."""
        ...

    def num_live(self) -> Mapping[Pool, int]:
        """Workers that live, as this gateway sees them."""
        ...

    def scrape_targets(self) -> Sequence[ScrapeTarget]:
        """Of live workers, those that have metrics to be fetched."""
        ...

    def check_feasible(self, requests: Sequence[Request], caller: RequestContext) -> None:
        """Before those of one body are opened. Raises TandemError where all of them would never be admitted."""
        ...

    async def open(self, request: Request, caller: RequestContext, ledger: PhaseLedger) -> TokenStream:
        """Admit a request, whose `ledger` goes with it until it ends. Raises TandemError when it is refused; then
        nothing of it is left anywhere."""
        ...


Meter = Callable[[], TokenUsage | None]
"""Tokens of a request so far that count against quotas; None: no worker has begun it."""


class QuotaEntry(Protocol):
    """An admitted request's part of its tenant's quotas. It must be closed, however the request ends."""

    @property
    def standing(self) -> RateLimitStatus: ...

    def watch(self, meter: Meter) -> None:
        """What is used from now on; without a meter nothing is."""
        ...

    def close(self) -> None:
        """Settle with what the meter says at last. A second time nothing happens."""
        ...


class Quotas(Protocol):
    """Counts what tenants use against their limits."""

    def check_feasible(self, tenant: Tenant, sizes: Sequence[tuple[int, int]]) -> None:
        """Before several requests are entered that belong together, with the tokens of each one's prompt and of its
        longest output. Raises TandemError(INVALID_REQUEST) where all of them would never be let in."""
        ...

    async def enter(self, tenant: Tenant, num_prompt_tokens: int, max_output_tokens: int) -> QuotaEntry:
        """Reserve what a request may use. Raises TandemError(QUOTA) with the limit that it met as its reason, or
        INVALID_REQUEST where it is larger than any minute's worth."""
        ...


class KnownPrefixes(Prefixes, Protocol):
    """What is known of workers' caches, and how true it has proven."""

    async def name(self, request: Request) -> Sequence[BlockHash]:
        """What the prompt's full blocks are called; nothing where no worker serves the model."""
        ...


class _NoPrefixes:
    """A KnownPrefixes that knows of none; prompts are not even hashed."""

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        return {}

    async def name(self, request: Request) -> Sequence[BlockHash]:
        return ()

    def reported(self, predicted: Prediction, num_cached: int) -> None:
        return


NO_PREFIXES: KnownPrefixes = _NoPrefixes()


class Authenticator(Protocol):
    """Knows tenants by their keys."""

    def identify(self, key: str | None) -> Tenant:
        """Whose key it is; None: the client showed none. Raises TandemError(UNAUTHENTICATED)."""
        ...

    def problem(self) -> str | None:
        """What is wrong with what it knows, though it goes on with that."""
        ...


class AllowAll:
    """A Doorkeeper that lets everybody in (`auth: off`)."""

    def identify(self, key: str | None) -> Tenant:
        return OPEN

    def problem(self) -> str | None:
        return None
