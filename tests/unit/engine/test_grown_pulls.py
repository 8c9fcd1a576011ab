"""Test pulls that grow while they are read: no block is written that is still to be copied to host memory, and no
message of a source breaks the engine."""

from __future__ import annotations

import pytest

from tandem.core.errors import ErrorKind
from tandem.core.events import Failed, JobEvent, SampledToken
from tandem.core.ids import BlockId, HandoffId
from tandem.core.request import GenerateJob, ResumeJob
from tandem.engine.effects import Effect, StartRead
from tandem.engine.engine import Engine
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import Announcement, BlockDigest
from tests.unit.engine.test_engine import OTHER, engine, finish, request, step

SIZE = 2
NUM_BLOCKS = 16


MOVES = ResumeJob(
    request=request("r", range(4), 24),
    attempt=2,
    handoff=HandoffId("h"),
    source=OTHER,
    offer_attempt=1,
    output_tokens=(9,),
)


def full_of_prefixes() -> tuple[Engine, BlockPool]:
    """Build an engine with a host cache and a pool that is full of cached blocks."""
    pool = BlockPool(NUM_BLOCKS, SIZE, num_host_slots=8)
    e = engine(pool, 64)
    for first in (100, 200):
        prompt = range(first, first + NUM_BLOCKS)
        e.submit(GenerateJob(request=request(f"f{first}", prompt, 1), attempt=1), 0.0)
        step(e)
    assert pool.num_cached == NUM_BLOCKS
    return e, pool


def announced(first: int, stop: int, num_computed: int) -> Announcement:
    blocks = tuple(BlockDigest(BlockId(40 + index), ()) for index in range(first, stop))
    return Announcement(MOVES.offer, first, blocks, num_computed, (), 0, True)


def steps(e: Engine, pool: BlockPool, now: float) -> list[BlockId]:
    """Run one step, which may have nothing to compute; return the reads it starts."""
    plan, effects = e.begin(now)
    here = reads(e, pool, effects, now)
    if plan is not None:
        here += reads(e, pool, finish(e, plan, 50, now=now), now)
    return here


def reads(e: Engine, pool: BlockPool, effects: list[Effect], now: float) -> list[BlockId]:
    """Carry out the reads at once, as a transport may."""
    read = [effect for effect in effects if isinstance(effect, StartRead)]
    for one in read:
        assert not pool.is_copied(one.local), f"{one} overwrites what the next step copies to host memory"
        e.read_done(one.read, now)
    return [block for one in read for block in one.local]


@pytest.mark.parametrize("is_late", [False, True])
def test_blocks_that_it_grows_by_are_copied_out_before_they_are_read_into(is_late: bool) -> None:
    """Let the pull grow before its blocks were granted, and after."""
    e, pool = full_of_prefixes()
    e.submit(MOVES, 1.0)
    e.announced(announced(0, 2, 5), 1.0)
    if not is_late:
        e.announced(announced(2, 8, 16), 1.0)
    here = [block for now in (1.0, 1.1) for block in steps(e, pool, now)]
    e.renewed((MOVES.offer,), 1.0, 10.0)
    if is_late:
        assert len(here) == 2
        here += reads(e, pool, e.announced(announced(2, 8, 16), 1.2), 1.2)
    here += [block for now in (1.3, 1.4, 1.5) for block in steps(e, pool, now)]
    assert len(here) == len(set(here)) == 8
    e.check()


@pytest.mark.parametrize("num_sampled", [2, 10])
def test_a_prefill_that_hands_over_more_than_one_token_ends_only_its_job(num_sampled: int) -> None:
    """The source offers more blocks than there are local blocks to read into."""
    e = engine(BlockPool(64, SIZE), 64)
    job = ResumeJob(request=request("r", range(4), 30), attempt=1, handoff=HandoffId("h"), source=OTHER)
    e.submit(job, 1.0)
    blocks = tuple(BlockDigest(BlockId(index), ()) for index in range(8))
    sampled = tuple(SampledToken(5) for _ in range(num_sampled))
    effects = e.announced(Announcement(job.offer, 0, blocks, 4 + num_sampled - 1, sampled), 1.0)
    (failed,) = [effect for effect in effects if isinstance(effect, JobEvent)]
    assert isinstance(failed, Failed) and failed.kind is ErrorKind.KV_LOST
    e.check()
    assert e.is_idle
