"""What a sequence that moves to another worker offers of its blocks, and when."""

from __future__ import annotations

from tandem.kv.pool import BlockPool
from tandem.sched.departure import Departures
from tandem.sched.policy import SchedulerLimits
from tandem.sched.scheduler import Scheduler
from tests.unit.sched.test_scheduler import add, generate, step


def test_without_digests_whole_blocks_alone_are_readable_while_it_draws_on() -> None:
    limits = SchedulerLimits(max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64, digest_handoffs=False)
    scheduler = Scheduler(BlockPool(10, 2), limits, "model")
    departures: Departures = scheduler.departures
    add(scheduler, generate("a", 3, 5))
    step(scheduler)
    (key,) = departures.movable()
    standing = departures.follow(key)
    assert standing.num_computed == 3 and len(standing.fresh) == 1 and not standing.has_stopped
