"""Define the interfaces through which the HTTP and gRPC front ends use the dispatcher and API keys.

The only implementation here is `AllowAll`, an authenticator that checks nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from tandem.admission.tenant import OPEN, Tenant
from tandem.core.events import Finished, PromptLogprobs, Token
from tandem.core.lane import Lane
from tandem.core.request import Request
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.text.text_model import TextModel
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.routing.worker_view import WorkerView


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Describe a model that clients may request: a live worker serves it, or served it until at most
    `gateway.no_worker_wait_s` seconds ago, or a planner starts workers for it when a request waits.

    `name`: the name that workers use. `aliases`: further names that clients may use and workers do not know.
    `max_model_len`: the most tokens of prompt and output together. `text`: the model's tokenizer and chat template.
    `created`: when this gateway first saw the model, in seconds since the epoch."""

    name: str
    max_model_len: int
    text: TextModel
    created: int
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return every name that clients may use: `name`, then the aliases."""
        return (self.name, *self.aliases)


class TokenStream(Protocol):
    """Yield the output of one admitted request as an asynchronous iterator.

    Yields the tokens of each choice in order of their index, one `Finished` at the end of each choice, and the log
    probabilities of the prompt (`PromptLogprobs`) before the first token. Ends after the last `Finished`. Raises
    TandemError where the request fails. A reader that stops early must call `close`."""

    @property
    def path(self) -> str:
        """Return which kind of placement served the request: `remote` (prefill and decode on two workers), `local` (one
        worker) or `fallback` (one worker, because the request could not be split).

        `;reason=...` may follow `local` and `fallback`. `;held` follows where the request was held until a worker could
        serve its model (`gateway.wake_timeout_s`). The value is fixed once the first token was yielded, except that
        later retries on other workers append `;retries=` and their number."""
        ...

    @property
    def num_attempts(self) -> int:
        """Return how many times the request was placed on workers: 1 plus the number of retries."""
        ...

    @property
    def workers(self) -> Sequence[str]:
        """Return the ids of the workers of the latest placement, first that of the worker that computes the prompt;
        empty before the first placement."""
        ...

    @property
    def reasons(self) -> Mapping[str, object]:
        """Return why the router chose the workers of the latest placement, with the predicted costs, as values for
        JSON.

        The result is final once the first token was yielded; it is empty while the request has no placement."""
        ...

    @property
    def rate_limits(self) -> Mapping[str, str]:
        """Return the tenant's headers `x-ratelimit-*`, as of this request's admission; empty for a tenant without
        limits."""
        ...

    @property
    def has_more(self) -> bool:
        """Return whether an event has arrived that the iterator will yield without waiting."""
        ...

    def __aiter__(self) -> AsyncGenerator[Token | PromptLogprobs | Finished, None]:
        """Return a generator of the events. The caller closes it unless it reads it to its end; otherwise the event
        loop creates a task to close it."""
        ...

    def finish(self, choice: int) -> None:
        """Stop one choice because the client needs no more of it; the stream yields nothing more of that choice, not
        even its `Finished`."""
        ...

    def close(self) -> None:
        """Cancel the request at every worker, unless it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """Hold the numbers of KV blocks that all live workers have together, and the block size.

    `block_size`: tokens of a block, as reported by the live worker to which the gateway connected first. `num_blocks`:
    all blocks; more than 0. `num_unused`: blocks that a new sequence could use, including those that hold a cached
    prefix."""

    block_size: int
    num_blocks: int
    num_unused: int


class RequestDispatcher(Protocol):
    """Admit requests, place them on workers and stream their output; a front end only translates HTTP or gRPC to these
    calls."""

    def models(self) -> Sequence[ServedModel]:
        """Return the models that clients may request now."""
        ...

    def ready(self) -> str | None:
        """Return None when requests can be served, otherwise a sentence that describes what is missing."""
        ...

    def num_queued(self) -> Mapping[Lane, int]:
        """Return the number of requests that wait for a placement, by lane; every lane has an entry."""
        ...

    def problem(self) -> str | None:
        """Return a sentence on what is wrong among the workers, such as a missing link; None where nothing is wrong.

        `ready` may report the gateway as ready in spite of such a problem.
        """
        ...

    def kv_blocks(self) -> KVBlocks | None:
        """Return how many KV blocks all live workers have together and how many of these are unused, with the block
        size; None while no live worker has reported any blocks."""
        ...

    def scrape_targets(self) -> Sequence[tuple[str, WorkerView]]:
        """Return the live workers that serve metrics themselves, each with the address (host:port) of its metrics."""
        ...

    def check_feasible(self, requests: Sequence[Request], caller: RequestContext) -> None:
        """Check the requests of one HTTP body or RPC before any of them is opened.

        Raises TandemError(INVALID_REQUEST) where the limits of the caller's tenant could never admit all of them
        together."""
        ...

    async def open(self, request: Request, caller: RequestContext, ledger: PhaseLedger) -> TokenStream:
        """Admit a request and return the stream of its output, without waiting for a placement.

        `ledger` accounts for the time of the request, phase by phase, until it ends, and for its preemptions. Raises
        TandemError when the request is refused; then no quota, queue or worker holds anything of it."""
        ...


class Authenticator(Protocol):
    """Find the tenant of an API key."""

    def identify(self, keys: AbstractSet[str]) -> Tenant:
        """Return the tenant that owns the API key in `keys`, the set of different keys that a client sent.

        Raises TandemError(UNAUTHENTICATED) where a key is required and `keys` is empty, holds more than one key, or
        holds a key that is unknown or expired."""
        ...

    def find(self, name: str) -> Tenant | None:
        """Return the tenant of this name, whether or not it has keys; None where there is none."""
        ...

    def problem(self) -> str | None:
        """Return a sentence on what is wrong with the known keys, such as a tenants file that does not parse; None if
        nothing is wrong.

        Meanwhile the last keys that could be read stay in use.
        """
        ...


class AllowAll:
    """Accept every client as the tenant `OPEN`, whatever keys it sends (`gateway.auth: off`)."""

    def identify(self, keys: AbstractSet[str]) -> Tenant:
        return OPEN

    def find(self, name: str) -> Tenant | None:
        return None

    def problem(self) -> str | None:
        return None
