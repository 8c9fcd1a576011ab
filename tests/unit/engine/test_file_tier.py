"""Test which blocks the engine reads from files and writes to them, for which jobs, and for how long jobs wait."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.core.config import HandoffConfig
from tandem.core.events import Finished, Token
from tandem.core.ids import JobKey, RequestId
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.core.step_cost import StepCost
from tandem.engine.effects import Effect, ReadFiles, WriteFiles
from tandem.engine.engine import Engine
from tandem.engine.file_tier import MAX_OPEN_WRITES, MAX_READ_BLOCKS, WRITE_PAUSE_S
from tandem.engine.kv_consumer import MAX_PREFIX_FETCH_S
from tandem.kv.block_pool import BlockPool
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.sched.state.limits import SchedulerLimits
from tests.property.model import KVStore, ModelExecutor

SIZE = 2
PROMPT = tuple(range(9))
HASHES = chain_hashes(root_hash("model", SIZE, ""), PROMPT, SIZE)
"""Four full blocks."""


class Node:
    """An engine with its executor, whose effects of the file tier the test carries out."""

    def __init__(self, num_blocks: int = 8, num_host_slots: int = 8) -> None:
        self.pool = BlockPool(num_blocks, SIZE, num_host_slots=num_host_slots, keeps_files=True)
        limits = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=600)
        self.engine = Engine(self.pool, limits, HandoffConfig(), "model")
        self.store = KVStore(num_blocks, SIZE, num_host_slots)
        self.executor = ModelExecutor(self.store)
        self.now = 0.0
        self.num_jobs = 0
        self.reads: list[ReadFiles] = []
        self.writes: list[WriteFiles] = []
        self.events: list[Effect] = []

    def take(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ReadFiles):
                self.reads.append(effect)
            elif isinstance(effect, WriteFiles):
                self.writes.append(effect)
            else:
                self.events.append(effect)
        self.engine.check()

    def submit(self, prompt: Sequence[int] = PROMPT) -> JobKey:
        self.num_jobs += 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        request = Request(id=RequestId(f"r{self.num_jobs}"), model="m", prompt_tokens=tuple(prompt), sampling=sampling)
        job = GenerateJob(request=request, attempt=1)
        self.take(self.engine.submit(job, self.now))
        return job.key

    def run(self) -> None:
        """Run steps until there is nothing to compute."""
        while True:
            plan, effects = self.engine.begin(self.now)
            self.take(effects)
            if plan is None:
                return
            self.take(self.engine.finish(self.executor.execute(plan), self.now))

    def compute(self, prompt: Sequence[int] = PROMPT) -> None:
        self.submit(prompt)
        self.run()

    def arrive(self, read: ReadFiles, first: int, number: int, *, is_over: bool, seconds: float = 0.0) -> None:
        """Put the next `number` blocks of a read of PROMPT from block `first` on into their slots, and report them."""
        source = KVStore(4, SIZE)
        source.receive([0, 1, 2, 3], 0, PROMPT[:8])  # type: ignore[list-item]
        for block_hash, slot in list(zip(read.hashes, read.slots, strict=True))[first : first + number]:
            self.store.host[slot] = list(source.cells[HASHES.index(block_hash)])
        self.take(self.engine.files_read(read.read, number, seconds, self.now, is_over=is_over))

    def ends(self) -> list[Finished]:
        return [event for event in self.events if isinstance(event, Finished)]


@pytest.fixture
def node() -> Node:
    made = Node(num_blocks=16)
    made.engine.files_changed(HASHES, ())
    return made


def test_a_job_waits_for_its_prefix_and_starts_with_it(node: Node) -> None:
    node.submit()
    (read,) = node.reads
    assert read.hashes == tuple(HASHES) and len(set(read.slots)) == 4
    node.run()
    assert not node.events, "it waits"
    node.arrive(read, 0, 3, is_over=False)
    node.run()
    assert not node.events
    node.arrive(read, 3, 1, is_over=True)
    node.run()
    assert [end.num_cached_tokens for end in node.ends()] == [8]
    assert sum(isinstance(event, Token) for event in node.events) == 1
    assert node.engine.books().num_file_hit_tokens == 8 and node.engine.is_idle


def test_what_arrived_before_a_missing_file_is_used(node: Node) -> None:
    node.submit()
    node.arrive(node.reads[0], 0, 2, is_over=True)
    node.run()
    assert [end.num_cached_tokens for end in node.ends()] == [4]
    assert list(node.engine._files.slots()) == [] and node.engine.books().num_host_blocks == 0


def test_a_second_job_waits_for_the_same_read(node: Node) -> None:
    node.submit()
    node.submit((*PROMPT[:6], 77, 78, 79))
    assert len(node.reads) == 1
    node.arrive(node.reads[0], 0, 4, is_over=True)
    node.run()
    assert [end.num_cached_tokens for end in node.ends()] == [8, 6] and len(node.reads) == 1


def test_a_job_does_not_wait_for_blocks_that_only_another_one_needs(node: Node) -> None:
    node.submit()
    short = node.submit((*PROMPT[:4], 77, 78, 79))
    node.arrive(node.reads[0], 0, 3, is_over=False)
    node.run()
    assert [(end.key, end.num_cached_tokens) for end in node.ends()] == [(short, 4)]
    node.arrive(node.reads[0], 3, 1, is_over=False)
    node.run()
    assert [end.num_cached_tokens for end in node.ends()] == [4, 8]
    node.arrive(node.reads[0], 4, 0, is_over=True)


@pytest.mark.parametrize("num_together", [2, 4])
def test_a_job_that_waited_for_its_first_blocks_has_the_others_read_too(node: Node, num_together: int) -> None:
    """Also where blocks that only the other prompt has arrive together with those."""
    other = (*PROMPT[:4], 77, 78, 79, 80, 81)
    hashes = chain_hashes(root_hash("model", SIZE, ""), other, SIZE)
    node.engine.files_changed(hashes, ())
    node.submit()
    key = node.submit(other)
    node.arrive(node.reads[0], 0, num_together, is_over=False)
    first, second = node.reads
    assert second.hashes == tuple(hashes[2:]) and second.before == first.hashes[:2]
    node.arrive(first, num_together, 4 - num_together, is_over=True)
    node.run()
    assert [end.num_cached_tokens for end in node.ends()] == [8]
    node.take(node.engine.files_read(second.read, 0, 0.0, node.now, is_over=True))
    node.run()
    assert [(end.key, end.num_cached_tokens) for end in node.ends()[1:]] == [(key, 4)]


def test_a_job_that_waited_for_too_long_starts_and_later_ones_do_not_wait(node: Node) -> None:
    node.submit()
    assert node.engine.next_deadline() == MAX_PREFIX_FETCH_S
    node.now = MAX_PREFIX_FETCH_S
    node.take(node.engine.tick(node.now))
    node.engine.files_changed(chain_hashes(root_hash("model", SIZE, ""), (50,) * 9, SIZE), ())
    node.submit((50,) * 9)
    assert len(node.reads) == 1
    node.run()
    assert [end.num_cached_tokens for end in node.ends()] == [0, 0]
    # The blocks are cached already when they arrive at last, and their slots are free again.
    node.arrive(node.reads[0], 0, 4, is_over=True)
    assert node.engine.books().num_host_blocks == 0 and list(node.engine._files.slots()) == []


def test_a_job_that_is_cancelled_waits_no_more(node: Node) -> None:
    key = node.submit()
    node.take(node.engine.cancel(key, node.now))
    assert node.engine.is_idle and node.engine.next_deadline() == float("inf")
    node.arrive(node.reads[0], 0, 4, is_over=True)
    assert node.engine.books().num_host_blocks == 4, "others may use it"
    node.compute()
    assert [end.num_cached_tokens for end in node.ends()] == [8]


def test_what_takes_longer_to_read_than_to_compute_is_not_read(node: Node) -> None:
    node.engine.pacer.model.restart(StepCost(1e-3, 1e-6, 0.0, 0.0, 0.0))
    node.submit()
    node.arrive(node.reads[0], 0, 1, is_over=True, seconds=0.1)
    node.run()
    assert node.engine.live_jobs() == []
    for number in range(10, 14):
        node.engine.files_changed(chain_hashes(root_hash("model", SIZE, ""), (number,) * 9, SIZE), ())
        node.compute((number,) * 9)
    assert len(node.reads) == 1 and len(node.ends()) == 5


def test_only_the_blocks_behind_the_cached_ones_are_read_and_those_stay() -> None:
    small = Node(num_blocks=8, num_host_slots=3)
    small.compute(PROMPT[:5])
    small.engine.files_changed(HASHES, ())
    small.compute((40,) * 15)
    assert small.engine.books().num_host_blocks == 2, "the first two blocks were pushed out"
    small.submit()
    (read,) = small.reads
    assert read.hashes == (HASHES[2],), "three slots, of which the prefix has two"
    small.arrive(read, 0, 1, is_over=True)
    small.run()
    assert [end.num_cached_tokens for end in small.ends()][-1] == 6


def test_blocks_are_written_once_from_host_memory_and_few_at_a_time() -> None:
    node = Node(num_blocks=40, num_host_slots=64)
    node.compute(range(75))
    assert not node.writes, "all are in device memory"
    node.compute(range(100, 175))
    written = [write for effect in node.writes for write in effect.writes]
    assert 0 < len(written) <= MAX_OPEN_WRITES
    pending = list(written)
    while pending:
        slot, block_hash = pending.pop(0)
        before = len(node.writes)
        node.take(node.engine.file_written(slot, block_hash, node.now, is_done=True))
        pending += [write for effect in node.writes[before:] for write in effect.writes]
    every = [block_hash for effect in node.writes for _, block_hash in effect.writes]
    assert len(every) == len(set(every)) == node.engine.books().num_file_blocks >= 34
    assert node.engine.is_idle


def test_a_block_that_cannot_be_written_is_tried_again_after_a_while() -> None:
    node = Node(num_blocks=8, num_host_slots=8)
    node.compute((40,) * 15)
    node.compute((50,) * 15)
    ((slot, block_hash), *others) = node.writes.pop().writes
    node.take(node.engine.file_written(slot, block_hash, node.now, is_done=False))
    for each in others:
        node.take(node.engine.file_written(*each, node.now, is_done=True))
    assert not node.writes
    node.now = WRITE_PAUSE_S
    node.take(node.engine.tick(node.now))
    assert [effect.writes for effect in node.writes] == [((slot, block_hash),)]


def test_a_long_prefix_is_read_in_parts_while_somebody_waits() -> None:
    node = Node(num_blocks=400, num_host_slots=400)
    prompt = (7,) * (2 * SIZE * MAX_READ_BLOCKS + 1)
    hashes = chain_hashes(root_hash("model", SIZE, ""), prompt, SIZE)
    node.engine.files_changed(hashes, ())
    key = node.submit(prompt)
    (first,) = node.reads
    assert first.hashes == tuple(hashes[:MAX_READ_BLOCKS]) and first.before == ()
    node.take(node.engine.files_read(first.read, MAX_READ_BLOCKS, 0.1, node.now, is_over=True))
    second = node.reads[1]
    assert second.hashes == tuple(hashes[MAX_READ_BLOCKS:]) and second.before == first.hashes
    node.take(node.engine.cancel(key, node.now))
    node.take(node.engine.files_read(second.read, 5, 0.1, node.now, is_over=True))
    assert len(node.reads) == 2 and node.engine.books().num_host_blocks == MAX_READ_BLOCKS + 5
