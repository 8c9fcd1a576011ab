"""What a router may know of the cluster, frozen at one moment, and how it ranks workers; never asks a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Set
from dataclasses import dataclass
from typing import Literal, get_args

from tandem.core.ids import WorkerRef
from tandem.core.lane import Lane
from tandem.core.step_cost import StepCost
from tandem.core.topology import UNLABELLED, Topology
from tandem.core.worker_load import HORIZON_STEPS, WorkerLoad, prompt_size

Pool = Literal["prefill", "decode", "mixed"]
POOLS: tuple[Pool, ...] = get_args(Pool)
Pair = tuple[WorkerRef, WorkerRef]
Ranking = Generator["WorkerView", None, None]
Cost = tuple[int | str, ...]
_STEP_TOKENS = 512
"""Of a worker that takes on any number of prompts."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One live worker. `load` is its own last word; `unreported` are the prompt tokens to compute of each request that
    this gateway has placed there since, so that a burst does not herd onto one worker. `step_cost`: how long its steps
    take, once told. `num_inflight`: sequences that this gateway has placed there to decode and of which it has not
    heard since. `block_size` in tokens, `block_bytes` of one block's KV; 0: not told."""

    ref: WorkerRef
    pool: Pool
    model: str
    fingerprint: str
    load: WorkerLoad
    unreported: tuple[int, ...] = ()
    step_cost: StepCost | None = None
    num_inflight: int = 0
    topology: Topology = UNLABELLED
    block_size: int = 0
    block_bytes: int = 0

    @property
    def prefills(self) -> bool:
        return self.pool != "decode"

    @property
    def decodes(self) -> bool:
        return self.pool != "prefill"

    @property
    def queued_tokens(self) -> int:
        return self.load.num_queued_tokens + sum(self.unreported)

    @property
    def num_step_tokens(self) -> int:
        """Of a full step."""
        return self.load.num_horizon_tokens // HORIZON_STEPS or _STEP_TOKENS

    @property
    def num_held_tokens(self) -> int:
        """Whose KV somebody holds there: about what all that run attend to."""
        return (self.load.num_blocks - self.load.num_free_blocks) * self.block_size

    @property
    def num_decoding(self) -> int:
        """Sequences that decode there; what runs on a prefill worker are prompts."""
        return self.load.num_running if self.decodes else 0

    @property
    def num_to_decode(self) -> int:
        """Sequences that run there or are to run soon."""
        return self.load.num_running + self.load.num_waiting + self.num_inflight

    def num_ahead(self, num_tokens: int, lane: Lane) -> int:
        """Prompt tokens that it computes before the end of a prompt of so many that comes now. Longer ones share their
        steps with it (`sched.share`), so no more of them counts than the newcomer's own."""
        load = self.load
        if not load.lane_tokens:
            return self.queued_tokens
        is_idle = not load.lane_tokens[lane] and not self.unreported
        ahead = 0 if is_idle else load.beside(num_tokens, lane, self.unreported)
        return ahead + num_tokens if prompt_size(load.lane_longest[lane]) > prompt_size(num_tokens) else ahead

    def takes(self, num_tokens: int, lane: Lane) -> bool:
        """Whether it will probably accept a prompt of so many tokens to compute."""
        return self.load.takes(num_tokens, lane, self.unreported)


def token_bytes(worker: WorkerView) -> float:
    """Of one token's KV; 0 where that was not told."""
    return worker.block_bytes / worker.block_size if worker.block_size else 0.0


def prefill_cost(worker: WorkerView) -> Cost:
    return (worker.queued_tokens, worker.ref.id)


def decode_cost(worker: WorkerView) -> Cost:
    load = worker.load
    return (worker.num_to_decode, load.num_reserved_blocks - load.num_free_blocks, worker.ref.id)


def whole_cost(worker: WorkerView) -> Cost:
    """Of all of a request in one place. Pools are labels: a prefill worker decodes too when there is no other."""
    return (not worker.decodes, worker.queued_tokens, *decode_cost(worker))


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A router's `Candidates` as a snapshot: ranks by sorting, which says what `Roster` means. `linked` holds the
    (prefill, decode) pairs between which a block has moved; `unlinked` those where it was tried and failed, `refused`
    those of them whose link is not as required. A pair in neither is being tried."""

    workers: tuple[WorkerView, ...] = ()
    linked: Set[Pair] = frozenset()
    unlinked: Set[Pair] = frozenset()
    refused: Set[Pair] = frozenset()

    def pools(self, model: str) -> Counter[Pool]:
        return Counter(worker.pool for worker in self._able(model))

    def find(self, model: str, ref: WorkerRef) -> WorkerView | None:
        return next((worker for worker in self._able(model) if worker.ref == ref), None)

    def prefill_workers(self, model: str) -> Ranking:
        return self._ranked(model, prefill_cost, lambda worker: worker.prefills)

    def decode_workers(self, model: str) -> Ranking:
        return self._ranked(model, decode_cost, lambda worker: worker.decodes)

    def mixed_workers(self, model: str) -> Ranking:
        return self._ranked(model, whole_cost, lambda worker: True)

    def _able(self, model: str) -> list[WorkerView]:
        return [worker for worker in self.workers if worker.model == model and not worker.load.draining]

    def _ranked(self, model: str, cost: Callable[[WorkerView], Cost], fits: Callable[[WorkerView], bool]) -> Ranking:
        yield from sorted(filter(fits, self._able(model)), key=cost)
