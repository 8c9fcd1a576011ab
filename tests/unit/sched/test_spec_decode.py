"""Test single decisions about draft tokens; invariants are in the property tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.core.events import FinishReason, SampledToken
from tandem.core.request import GenerateJob, Job
from tandem.kv.block_pool import BlockPool
from tandem.sched.phases.spec_decode import Speculation
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.schedule_result import SequenceUpdate
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult, StepPlan, StepResult
from tests.unit.sched.test_scheduler import finish, prefill, request, resume


class Sevens:
    def propose(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        return (7,) * max_tokens


def scheduler(*, num_blocks: int = 20, budget: int = 16, max_batch: int = 16) -> Scheduler:
    limits = SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=4, max_model_len=64)
    speculation = Speculation(Sevens, num_tokens=4, max_batch_tokens=max_batch)
    return Scheduler(BlockPool(num_blocks, 4), limits, "model", speculation)


def generate(name: str, length: int = 3, max_tokens: int = 20) -> GenerateJob:
    return GenerateJob(request=request(name, length, max_tokens), attempt=1)


def plan(s: Scheduler) -> StepPlan:
    step = s.plan().step
    assert step is not None
    s.check()
    return step


def commit(s: Scheduler, step: StepPlan, *sampled: int) -> list[SequenceUpdate]:
    """Commit a step in which each sampling slice yields `sampled`."""
    progress = finish(s, step, *sampled)
    s.check()
    return progress


def started(s: Scheduler, *jobs: Job) -> Scheduler:
    """Add jobs, compute their prompts and sample one token of each."""
    for job in jobs:
        s.add(job)
    commit(s, plan(s), 50)
    return s


def only(step: StepPlan) -> ScheduledSlice:
    (piece,) = step.slices
    return piece


def test_a_decode_carries_guesses_and_goes_on_after_the_right_ones() -> None:
    s = started(scheduler(), generate("a"))
    step = plan(s)
    piece = only(step)
    assert (piece.start, piece.num_tokens, piece.num_drafted, piece.tokens) == (3, 5, 4, (50, 7, 7, 7, 7))
    assert piece.sampling is not None and piece.sampling.index == 1 and len(piece.blocks) == 2
    (progress,) = commit(s, step, 7, 7, 60)
    assert (progress.first_index, [t.id for t in progress.tokens]) == (1, [7, 7, 60])
    assert progress.num_computed == 6, "the first token and two guesses"
    piece = only(plan(s))
    assert (piece.start, piece.tokens[0]) == (6, 60)
    assert piece.sampling is not None and piece.sampling.index == 4
    assert s.speculation is not None and (s.speculation.num_drafted, s.speculation.num_accepted) == (4, 2)


def test_wrong_guesses_change_nothing_but_the_length() -> None:
    s = started(scheduler(), generate("a"))
    (progress,) = commit(s, plan(s), 60)
    assert progress.num_computed == 4
    piece = only(plan(s))
    assert (piece.start, piece.num_drafted, piece.tokens) == (4, 2, (60, 7, 7))


def test_only_blocks_of_right_guesses_are_found_by_others() -> None:
    s = started(scheduler(), generate("a"))
    commit(s, plan(s), 7, 60)
    seq = next(iter(s.state.running))
    assert seq.table.num_published == 1 and len(seq.table) == 2
    assert s.pool.count_hits(seq.hashes(1, 4)) == 1


def test_it_never_guesses_beyond_the_last_token() -> None:
    s = started(scheduler(), generate("a", max_tokens=3))
    piece = only(plan(s))
    assert piece.num_drafted == 1
    s = started(scheduler(), generate("a", max_tokens=2))
    assert only(plan(s)).num_drafted == 0


def test_tokens_after_a_stop_are_dropped() -> None:
    s = started(scheduler(), generate("a"))
    (progress,) = commit(s, plan(s), 7, 99, 7)
    assert [t.id for t in progress.tokens] == [7, 99] and progress.finish is FinishReason.STOP
    assert progress.num_computed == 5 and s.pool.num_free == 20 and s.num_sequences == 0


@pytest.mark.parametrize("num_right", [0, 1, 4])
def test_an_output_that_is_complete_ends_with_the_guesses_that_were_right(num_right: int) -> None:
    s = started(scheduler(), generate("a"))
    step = plan(s)
    sampled = tuple(SampledToken(7) for _ in range(num_right))
    (progress,) = s.commit(StepResult(step.number, (SliceResult(only(step).seq, sampled, is_complete=True),)))
    s.check()
    assert progress.finish is FinishReason.STOP and progress.tokens == sampled
    assert s.pool.num_free == 20 and s.num_sequences == 0
    assert s.speculation is not None and s.speculation.num_accepted == num_right


def test_while_guesses_are_open_a_sequence_is_not_planned_and_cancelling_frees_it_later() -> None:
    s = started(scheduler(), generate("a"))
    step = plan(s)
    assert s.plan().step is None
    assert s.cancel(generate("a").key)
    s.check()
    assert s.pool.num_free < 20
    assert commit(s, step, 7, 7) == [] and s.pool.num_free == 20


def test_nothing_is_guessed_after_a_token_that_is_not_known() -> None:
    s = scheduler()
    s.add(generate("a"))
    first, second = plan(s), plan(s)
    assert only(second).chained and only(second).num_drafted == 0
    commit(s, first, 50)


def test_a_failed_slice_with_guesses_ends_cleanly() -> None:
    s = started(scheduler(), generate("a"))
    step = plan(s)
    (progress,) = s.commit(StepResult(step.number, (SliceResult(only(step).seq, error="no"),)))
    s.check()
    assert progress.error == "no" and s.pool.num_free == 20


def test_a_prefill_samples_one_token_and_drafts_none() -> None:
    s = scheduler()
    s.add(prefill("p", 1))
    assert only(plan(s)).num_drafted == 0


def test_a_resume_guesses_once_its_kv_is_here() -> None:
    s = scheduler()
    job = resume("r", 3, 20)
    s.add(job)
    s.on_producer_ready(job.key)
    assert s.plan().step is None
    s.kv_arrived(job.key, (SampledToken(50),), 0, job.num_known_tokens)
    assert only(plan(s)).tokens == (50, 7, 7, 7, 7)


@pytest.mark.parametrize(("max_batch", "drafted"), [(16, [4, 4, 4]), (8, [2, 2, 1]), (4, [1, 0, 0]), (3, [0, 0, 0])])
def test_a_large_batch_guesses_less_and_evenly(max_batch: int, drafted: list[int]) -> None:
    s = started(scheduler(max_batch=max_batch), *(generate(name) for name in "abc"))
    assert [p.num_drafted for p in plan(s).slices] == drafted


def test_prompts_are_scheduled_before_draft_tokens() -> None:
    s = started(scheduler(budget=8), generate("a"))
    s.add(generate("b", length=5))
    assert [(p.num_certain, p.num_drafted) for p in plan(s).slices] == [(1, 2), (5, 0)]


@pytest.mark.parametrize(("num_blocks", "waiting", "drafted"), [(2, 0, 1), (3, 0, 4), (6, 17, 1)])
def test_guesses_take_no_block_that_others_grow_into_or_wait_for(num_blocks: int, waiting: int, drafted: int) -> None:
    """The next token takes the last slot but one of its block; more draft tokens would need another block."""
    s = started(scheduler(num_blocks=num_blocks), generate("a", length=2, max_tokens=6))
    if waiting:
        s.add(generate("w", length=waiting, max_tokens=1))
    free = s.pool.num_free
    step = plan(s)
    assert only(step).num_drafted == drafted
    assert s.pool.num_free == free - (drafted > 1)


def test_one_free_block_holds_the_guesses_of_one() -> None:
    s = started(scheduler(num_blocks=5), generate("a", max_tokens=9), generate("b", max_tokens=9))
    assert s.pool.num_free == 3, "one of them is spare: two are what the sequences grow into next"
    assert [p.num_drafted for p in plan(s).slices] == [4, 0] and s.pool.num_free == 2


def test_bounds() -> None:
    for bad in ({"num_tokens": 0}, {"max_batch_tokens": 0}):
        with pytest.raises(ValueError, match="guesses"):
            Speculation(Sevens, **({"num_tokens": 1, "max_batch_tokens": 1} | bad))
