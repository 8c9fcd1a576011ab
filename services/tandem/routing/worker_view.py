"""Define what a router knows of one worker at one moment, and the costs by which it ranks workers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import get_args

from tandem.core.config import Pool
from tandem.core.ids import WorkerRef
from tandem.core.lane import ALL_LANES, Lane
from tandem.core.step_cost import StepCost
from tandem.core.topology import UNLABELLED, Topology
from tandem.core.worker_load import HORIZON_STEPS, WorkerLoad, prompt_size

POOLS: tuple[Pool, ...] = get_args(Pool)
Pair = tuple[WorkerRef, WorkerRef]
Ranking = Generator["WorkerView", None, None]
Cost = tuple[int | str, ...]
_STEP_TOKENS = 512
"""Assumed tokens of a full step of a worker that accepts any number of prompts."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """Describe what a router knows of one live worker at one moment.

    - `load`: the worker's last report. `unreported`: the prompt tokens to compute of each request that this gateway has
      placed on the worker and that is not in `load` yet. `num_inflight`: number of sequences that this gateway has
      placed there to decode and that are not in `load` yet.
    - `step_cost`: predicts its step times; None until reported.
    - `block_size`: tokens of a KV block; `block_bytes`: bytes of one; both 0 until reported.
    - `lanes`: the lanes whose requests are placed on the worker.
    - `max_num_seqs`: most sequences that run on it at a time; 0: not reported.
    """

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
    lanes: frozenset[Lane] = ALL_LANES
    max_num_seqs: int = 0

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
        """Return the most prompt tokens that the worker computes in one step; an assumed number when it does not report
        one."""
        return self.load.num_horizon_tokens // HORIZON_STEPS or _STEP_TOKENS

    @property
    def num_held_tokens(self) -> int:
        """Return the number of tokens for which the KV blocks in use have room: about the total context length of the
        sequences that run on the worker."""
        return (self.load.num_blocks - self.load.num_free_blocks) * self.block_size

    @property
    def num_decoding(self) -> int:
        """Return the number of sequences that the worker decodes: those that run there, or 0 for a prefill worker,
        whose sequences are prompts."""
        return self.load.num_running if self.decodes else 0

    @property
    def num_to_decode(self) -> int:
        """Return the number of sequences that run on the worker, wait there, or were sent there by this gateway to
        decode."""
        return self.load.num_running + self.load.num_waiting + self.num_inflight

    def num_ahead(self, num_tokens: int, lane: Lane) -> int:
        """Return the number of prompt tokens of other requests that the worker will compute before a new prompt is
        done.

        The new prompt is in `lane` and has `num_tokens` tokens to compute. Longer prompts share steps with it
        (`sched.budget.prefill_sharing`), so the longest prompt of its size class counts for at most `num_tokens`, and
        all prompts of larger size classes together for `num_tokens`.
        """
        load = self.load
        if not load.lane_tokens:
            return self.queued_tokens
        is_idle = not load.lane_tokens[lane] and not self.unreported
        ahead = 0 if is_idle else load.competing_tokens(num_tokens, lane, self.unreported)
        return ahead + num_tokens if prompt_size(load.lane_longest[lane]) > prompt_size(num_tokens) else ahead

    def has_seat(self, lane: Lane) -> bool:
        """Return whether a sequence of `lane` probably gets a seat on the worker at once: one is free, or a sequence of
        a less urgent lane yields its own."""
        if not self.max_num_seqs:
            return True
        seats = self.load.lane_seqs
        num_taken = sum(seats[: lane + 1]) if seats else self.load.num_running
        return num_taken + self.num_inflight < self.max_num_seqs

    def has_room(self, num_tokens: int) -> bool:
        """Return whether the free blocks of the worker, without those that are reserved, probably hold `num_tokens`
        more tokens of one sequence, and as many of each sequence in `num_inflight`; True where the blocks are not
        reported."""
        if not self.block_size or not self.load.num_blocks:
            return True
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks * (1 + self.num_inflight) <= self.load.num_free_blocks - self.load.num_reserved_blocks

    def takes(self, num_tokens: int, lane: Lane) -> bool:
        """Return whether the worker will probably accept a prompt in `lane` of which `num_tokens` have to be
        computed."""
        return self.load.takes(num_tokens, lane, self.unreported)


def token_bytes(worker: WorkerView) -> float:
    """Return the bytes of one token's KV; 0 where the block size is not reported."""
    return worker.block_bytes / worker.block_size if worker.block_size else 0.0


def can_serve_prefix(producer: WorkerView, consumer: WorkerView) -> bool:
    """Return whether the worker `consumer` can use KV blocks of the worker `producer`. The two must be different
    workers, with equal fingerprint, block size and bytes per block."""
    return (
        producer.ref != consumer.ref
        and producer.fingerprint == consumer.fingerprint
        and (producer.block_size, producer.block_bytes) == (consumer.block_size, consumer.block_bytes)
    )


def prefill_cost(worker: WorkerView) -> Cost:
    """Return the sort key by which prefill workers are ranked: fewest queued prompt tokens first."""
    return (worker.queued_tokens, worker.ref.id)


def decode_cost(worker: WorkerView) -> Cost:
    """Return the sort key by which decode workers are ranked: fewest sequences first, then most free blocks that are
    not reserved."""
    load = worker.load
    return (worker.num_to_decode, load.num_reserved_blocks - load.num_free_blocks, worker.ref.id)


def local_cost(worker: WorkerView) -> Cost:
    """Return the sort key by which workers are ranked to run a whole request: workers of the prefill pool last, then
    fewest queued prompt tokens first."""
    return (not worker.decodes, worker.queued_tokens, *decode_cost(worker))
