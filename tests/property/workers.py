"""Parts of a simulated cluster: knobs, agenda, streams, and one incarnation of one worker."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.core.config import HandoffConfig
from tandem.core.ids import HandoffKey, Incarnation, JobKey, WorkerId, WorkerRef
from tandem.core.slo import Slo
from tandem.engine.engine import Engine
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import RemotePrefixRequest
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.slo_targets import LatencyTargets
from tandem.sched.state.step_plan import StepPlan
from tests.property.guesses import speculation
from tests.property.model import KVStore, ModelExecutor
from tests.property.times import TimesWitness

Action = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Faults are probabilities per occasion; `digests=False` leaves the lease alone to keep wrong KV out.
    `right_guesses` is the share of guesses that are right; None is no speculation. `prefix_fetches` is the share of
    jobs that are to read a prefix from some worker, which may have none of it. `files`: workers share block files.
    `moves` is the chance per round that a running choice is to move to another worker. `lost_files` is the share of
    reads, writes and files that fail or are gone."""

    num_blocks: tuple[int, ...] = (10, 10)
    num_host_slots: int = 0
    block_size: int = 2
    budget: int = 6
    max_num_seqs: int = 4
    chunked: bool = True
    itl_s: float = 0.0
    plan_depth: int = 1
    right_guesses: float | None = None
    digests: bool = True
    lane_preemptions: int = 1
    batch_max_share: float = 1.0
    lease_s: float = 3.0
    pull_timeout_s: float = 6.0
    drain_timeout_s: float = 3.0
    slow_reads: float = 0.3
    lost_calls: float = 0.0
    broken_links: float = 0.0
    broken_reads: float = 0.0
    hung_reads: float = 0.0
    failed_slices: float = 0.0
    stalls: float = 0.0
    deaths: float = 0.0
    cancels: float = 0.0
    drains: float = 0.0
    moves: float = 0.0
    prefix_fetches: float = 0.0
    files: bool = False
    lost_files: float = 0.0


class Agenda:
    """What is to happen when."""

    def __init__(self) -> None:
        self.now = 1.0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def after(self, seconds: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, action))

    def advance(self, seconds: float) -> None:
        stop = self.now + seconds
        while self._heap and self._heap[0][0] <= stop:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = stop


@dataclass(eq=False)
class Link:
    """A StreamHandoff stream. Messages of an older `life` are lost; each direction keeps its order."""

    life: int = 0
    last: dict[str, float] = field(default_factory=dict)
    following: dict[HandoffKey, RemotePrefixRequest | None] = field(default_factory=dict)


class Worker:
    """One life of one worker process."""

    def __init__(self, index: int, incarnation: int, knobs: Knobs) -> None:
        self.index = index
        self.ref = WorkerRef(WorkerId(f"w{index}"), Incarnation(incarnation), f"w{index}:{incarnation}")
        limits = SchedulerLimits(
            max_num_batched_tokens=max(knobs.budget, knobs.max_num_seqs),
            max_num_seqs=knobs.max_num_seqs,
            max_model_len=64,
            enable_chunked_prefill=knobs.chunked,
            digest_handoffs=knobs.digests,
            targets=LatencyTargets(interactive=Slo(itl_s=knobs.itl_s)),
            batch_max_share=knobs.batch_max_share,
            max_lane_preemptions=knobs.lane_preemptions,
            max_lane_pause_s=0.05,
        )
        handoff = HandoffConfig(
            lease_s=knobs.lease_s, pull_timeout_s=knobs.pull_timeout_s, drain_timeout_s=knobs.drain_timeout_s
        )
        pool = BlockPool(
            knobs.num_blocks[index], knobs.block_size, num_host_slots=knobs.num_host_slots, keeps_files=knobs.files
        )
        guesses = speculation(lambda: self.engine._jobs, index + incarnation, knobs.right_guesses)
        self.engine = Engine(pool, limits, handoff, "model", plan_depth=knobs.plan_depth, speculation=guesses)
        self.store = KVStore(knobs.num_blocks[index], knobs.block_size, knobs.num_host_slots)
        self.executor = ModelExecutor(self.store)
        self.plans: list[StepPlan] = []
        self.inbox: list[Action] = []
        self.stalled_until = 0.0
        self.is_alive = True
        self.ends: dict[JobKey, str] = {}
        self.times = TimesWitness()
        self.next_index: dict[JobKey, int] = {}
        self.num_scored: dict[JobKey, int] = {}
