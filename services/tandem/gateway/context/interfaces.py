"""Define the interfaces through which the HTTP and gRPC front ends use the dispatcher, quotas, prefixes and keys.

The only implementation here is the one that checks nothing, `AllowAll`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.admission.tenant import OPEN, Tenant
from tandem.admission.usage_estimator import TokenUsage
from tandem.core.events import Finished, PromptLogprobs, Token
from tandem.core.ids import BlockHash, WorkerId
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.text.text_model import TextModel
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.orchestration.request_queue import Prefixes
from tandem.routing.circuit_breaker import BreakerState
from tandem.routing.worker_view import Pool


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Model that at least one worker serves, or served until a moment ago.

    `name`: what workers call the model. `aliases`: further names that clients may use and workers do not know.
    `created`: in seconds since the epoch."""

    name: str
    max_model_len: int
    text: TextModel
    created: int
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class TokenStream(Protocol):
    """Output of one admitted request, as an asynchronous iterator.

    Iterating yields the tokens of each choice in order of their index and one Finished for each choice, and ends after
    the last Finished; or it raises TandemError. PromptLogprobs come before the first token. A consumer that stops
    early must call `close`, which cancels the request at every worker."""

    @property
    def path(self) -> str:
        """Return `remote`, `local`, `local;reason=...` or `fallback;reason=...`, fixed once the first token was
        yielded; after that only a suffix `;retries=...` may be added, which counts the retries on other workers."""
        ...

    @property
    def num_attempts(self) -> int:
        """Return 1 plus the number of retries."""
        ...

    @property
    def workers(self) -> Sequence[str]:
        """Return the ids of the workers of the latest placement; the worker that computes the prompt is the first."""
        ...

    @property
    def reasons(self) -> Mapping[str, object]:
        """Return why the router chose the placement, with its numbers, as values for JSON; final once the first token
        was yielded, empty while the request has no placement."""
        ...

    @property
    def rate_limits(self) -> Mapping[str, str]:
        """Return the headers `x-ratelimit-*` of the tenant after the admission."""
        ...

    @property
    def has_more(self) -> bool:
        """Return whether the next event can be yielded without waiting."""
        ...

    def __aiter__(self) -> AsyncIterator[Token | PromptLogprobs | Finished]: ...

    def finish(self, choice: int) -> None:
        """Stop one choice at the client's wish: the stream yields nothing more of it, not even its Finished."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """Endpoint of one worker's own metrics, for Prometheus: `address` is host:port."""

    address: str
    worker: WorkerId
    pool: Pool
    model: str


class RequestDispatcher(Protocol):
    """Admit, place and run requests; the front ends only translate HTTP and gRPC to and from these calls."""

    def models(self) -> Sequence[ServedModel]: ...

    def ready(self) -> str | None:
        """Return None when requests can be served, else a sentence that says what is missing."""
        ...

    def num_queued(self) -> Mapping[Lane, int]:
        """Count the requests that wait for a placement, by lane; every lane has an entry."""
        ...

    def breakers(self) -> Mapping[WorkerId, BreakerState]:
        """Return the circuit breakers' states of those workers whose last jobs failed."""
        ...

    def problem(self) -> str | None:
        """Describe what is wrong between workers, such as a missing link; None: nothing. The gateway stays ready."""
        ...

    def num_live(self) -> Mapping[Pool, int]:
        """Count the workers that are alive as this gateway sees them, by pool."""
        ...

    def scrape_targets(self) -> Sequence[ScrapeTarget]:
        """Return the metrics endpoints of the live workers that have one."""
        ...

    def check_feasible(self, requests: Sequence[Request], caller: RequestContext) -> None:
        """Check the requests of one HTTP body or RPC before any of them is opened. Raises TandemError where the quotas
        could never admit all of them."""
        ...

    async def open(self, request: Request, caller: RequestContext, ledger: PhaseLedger) -> TokenStream:
        """Admit a request and return the stream of its output; `ledger` receives its phases until it ends. Raises
        TandemError when the request is refused; then no quota, queue or worker holds anything of it."""
        ...


Meter = Callable[[], TokenUsage | None]
"""Returns the tokens of a request so far that count against quotas; None: no worker has begun the request."""


class QuotaEntry(Protocol):
    """Reservation of one admitted request in its tenant's quotas. It must be closed, however the request ends."""

    @property
    def rate_limits(self) -> Mapping[str, str]:
        """Return the headers `x-ratelimit-*` of the tenant after the admission."""
        ...

    def watch(self, meter: Meter) -> None:
        """Set the function that counts the request's tokens from now on; before this call the count is None."""
        ...

    def close(self) -> None:
        """Settle the reservation with the meter's last value. A second call does nothing."""
        ...


class Quotas(Protocol):
    """Count what tenants use and refuse requests beyond their limits."""

    def check_feasible(self, tenant: Tenant, sizes: Sequence[tuple[int, int]]) -> None:
        """Check several requests that belong together before any of them is entered; `sizes` has the tokens of each
        request's prompt and of its longest output. Raises TandemError(INVALID_REQUEST) where the limits could never
        admit all of them."""
        ...

    async def enter(self, tenant: Tenant, num_prompt_tokens: int, max_output_tokens: int) -> QuotaEntry:
        """Reserve the tokens that a request may use. Raises TandemError(QUOTA) with the exceeded limit as its reason,
        or INVALID_REQUEST where the request is larger than the tokens of a whole minute."""
        ...


class KnownPrefixes(Prefixes, Protocol):
    """Know which workers cache which blocks of a prompt."""

    async def name(self, request: Request) -> Sequence[BlockHash]:
        """Return the hashes of the prompt's full blocks; empty where no worker serves the model."""
        ...


class Authenticator(Protocol):
    """Find the tenant of an API key."""

    def identify(self, key: str | None) -> Tenant:
        """Return the tenant whose key this is; None: the client sent no key. Raises TandemError(UNAUTHENTICATED)."""
        ...

    def problem(self) -> str | None:
        """Describe what is wrong with the known keys, such as a tenants file that does not parse; None: nothing. The
        last good keys stay in use."""
        ...


class AllowAll:
    """Authenticator that gives every client the tenant `OPEN`, with or without a key (`auth: off`)."""

    def identify(self, key: str | None) -> Tenant:
        return OPEN

    def problem(self) -> str | None:
        return None
