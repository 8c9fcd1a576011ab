"""Test single decisions of the scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import FinishReason, SampledToken
from tandem.core.ids import HandoffId, Incarnation, RequestId, WorkerId, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, Request, ResumeJob, SamplingParams
from tandem.kv.block_pool import BlockPool, Holder
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.sched.scheduler import Scheduler
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.schedule_result import ScheduleResult, SequenceUpdate
from tandem.sched.state.step_plan import SliceResult, StepPlan, StepResult

SOURCE = WorkerRef(WorkerId("p"), Incarnation(1), "p:1")


def scheduler(num_blocks: int = 10, *, budget: int = 8, seqs: int = 4, retained: int = 0, **more: object) -> Scheduler:
    """Return a scheduler of blocks of two tokens; `more` are fields of `SchedulerLimits`."""
    limits = SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=seqs, max_model_len=64, **more)  # type: ignore[arg-type]
    return Scheduler(BlockPool(num_blocks, 2, max_retained_blocks=retained), limits, "model")


def request(name: str, prompt: int, max_tokens: int, *, salt: str = "", priority: int = 0, text: str = "") -> Request:
    """Requests share a prefix when they have one `text`; it is the name where none is given."""
    first = 1000 * sum(map(ord, text or name))
    return Request(
        id=RequestId(name),
        model="m",
        prompt_tokens=tuple(range(first, first + prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset({99})),
        cache_salt=salt,
        priority=priority,
    )


def generate(name: str, prompt: int, max_tokens: int, **more: object) -> GenerateJob:
    return GenerateJob(request=request(name, prompt, max_tokens, **more), attempt=1)  # type: ignore[arg-type]


def prefill(name: str, prompt: int) -> PrefillJob:
    return PrefillJob(request=request(name, prompt, 9), attempt=1, handoff=HandoffId(name))


def resume(name: str, prompt: int, max_tokens: int = 2) -> ResumeJob:
    return ResumeJob(request=request(name, prompt, max_tokens), attempt=1, handoff=HandoffId(name), source=SOURCE)


def names(s: Scheduler, step: StepPlan | None) -> list[str]:
    return [str(s.state.by_id[piece.seq].key.request) for piece in step.slices] if step is not None else []


def finish(s: Scheduler, step: StepPlan | None, *tokens: int) -> list[SequenceUpdate]:
    """Commit a plan in which each sampling slice yields `tokens`, by default one."""
    assert step is not None
    sampled = tuple(SampledToken(t) for t in tokens or (50,))
    return s.commit(
        StepResult(step.number, tuple(SliceResult(p.seq, sampled if p.sampling else ()) for p in step.slices))
    )


def step(s: Scheduler) -> tuple[list[str], ScheduleResult]:
    """Plan and commit one step; return its sequences and the schedule result."""
    planned = s.plan()
    who = names(s, planned.step)
    if planned.step is not None:
        finish(s, planned.step)
    s.check()
    return who, planned


def add(s: Scheduler, *jobs: Job) -> None:
    for job in jobs:
        s.add(job)


def test_decodes_are_scheduled_before_prompts() -> None:
    s = scheduler(budget=4)
    add(s, generate("a", 3, 5))
    step(s)
    add(s, generate("b", 9, 5))
    who, planned = step(s)
    assert who == ["a", "b"]
    assert planned.step is not None and [p.num_tokens for p in planned.step.slices] == [1, 3]


def test_tokens_after_the_end_are_dropped() -> None:
    s = scheduler()
    add(s, generate("a", 3, 5))
    planned = s.plan()
    (progress,) = finish(s, planned.step, 50, 99, 51)
    assert [t.id for t in progress.tokens] == [50, 99] and progress.finish is FinishReason.STOP
    assert s.num_sequences == 0 and s.pool.num_free == 10


def test_a_plan_made_before_the_end_was_known_frees_when_it_is_committed() -> None:
    s = scheduler()
    add(s, generate("a", 3, 5))
    first, second = s.plan().step, s.plan().step
    assert second is not None and second.slices[0].chained
    (progress,) = finish(s, first, 99)
    assert progress.finish is FinishReason.STOP and s.pool.num_free == 8
    s.check()
    assert finish(s, second) == [] and s.pool.num_free == 10


def test_results_must_be_committed_in_order() -> None:
    s = scheduler()
    add(s, generate("a", 3, 5))
    s.plan()
    second = s.plan().step
    assert second is not None
    with pytest.raises(ValueError, match="oldest open plan"):
        s.commit(StepResult(second.number, (SliceResult(second.slices[0].seq),)))
    assert s.num_open_plans == 2
    s.check()


def test_other_salts_share_nothing() -> None:
    s = scheduler()
    add(s, generate("a", 7, 1))
    step(s)
    add(s, generate("b", 7, 1, text="a", salt="tenant"), generate("c", 7, 1, text="a"))
    planned = s.plan()
    assert planned.step is not None and [p.start for p in planned.step.slices] == [0, 6]


def test_a_hit_leaves_a_token_to_compute() -> None:
    s = scheduler()
    add(s, generate("a", 6, 1))
    step(s)
    add(s, generate("b", 6, 1, text="a"))
    planned = s.plan()
    assert planned.step is not None and planned.step.slices[0].start == 4


def test_the_youngest_is_preempted_and_returns_to_its_place() -> None:
    s = scheduler(num_blocks=5)
    add(s, generate("a", 3, 7), generate("b", 3, 5))
    assert [step(s)[0] for _ in range(2)] == [["a", "b"]] * 2
    add(s, generate("c", 7, 2))
    who, planned = step(s)
    assert (who, planned.num_preempted) == (["a"], 1)
    assert [x.key.request for x in s.state.waiting] == ["b", "c"]
    assert [len(x.tokens) for x in s.state.waiting] == [5, 7], "what b has drawn is kept"


def test_lower_priority_is_preempted_first() -> None:
    s = scheduler(num_blocks=5)
    add(s, generate("low", 3, 5, priority=1), generate("high", 3, 7))
    step(s)
    assert [step(s)[0] for _ in range(2)][-1] == ["high"]
    assert [x.key.request for x in s.state.waiting] == ["low"]


def test_an_offered_prefill_is_never_preempted() -> None:
    """The oldest needs a block and only a younger, half-computed prefill holds one."""
    s = scheduler(num_blocks=7, budget=3)
    add(s, generate("old", 3, 9))
    step(s)
    add(s, prefill("young", 7))
    assert [step(s)[0] for _ in range(3)] == [["old", "young"]] * 3
    assert s.pool.num_free == 0
    who, planned = step(s)
    assert (who, planned.num_preempted) == (["young"], 1)


def test_a_pull_passes_what_waits_for_leases() -> None:
    """The lease may be the very one that the pull's own source waits for."""
    s = scheduler(num_blocks=10)
    add(s, resume("r", 5), prefill("p", 10))
    step(s)
    step(s)
    assert s.pool.num_leased == 5
    add(s, generate("g", 11, 1, priority=-1))
    s.on_producer_ready(resume("r", 5).key)
    planned = s.plan()
    assert [g.key.request for g in planned.pulls] == ["r"] and planned.step is None


def test_a_pull_does_not_pass_what_waits_for_running_sequences() -> None:
    s = scheduler(num_blocks=10, budget=16)
    add(s, generate("a", 11, 3))
    step(s)
    add(s, generate("g", 9, 1), resume("r", 3))
    s.on_producer_ready(resume("r", 3).key)
    assert s.plan().pulls == ()


def test_small_work_does_not_pass_large_work_for_ever() -> None:
    s = scheduler(num_blocks=10, budget=16)
    add(s, generate("a", 11, 3))
    step(s)
    add(s, generate("large", 9, 1), generate("small", 1, 1))
    assert step(s)[0] == ["a"]


def test_a_prefill_waits_for_leases_and_holds_back_only_prefills() -> None:
    s = scheduler(num_blocks=10, budget=16)
    add(s, prefill("p", 12))
    (offer,) = step(s)[1].starts
    add(s, prefill("q", 10), prefill("small", 1), generate("g", 1, 1))
    assert step(s)[0] == ["g"]
    s.pool.drop(offer.leased, Holder.LEASE)
    assert step(s)[0] == ["q", "small"]


def test_a_prefill_and_a_reservation_that_exclude_each_other() -> None:
    s = scheduler(num_blocks=10)
    add(s, resume("r", 9, 3))
    with pytest.raises(TandemError) as refusal:
        s.add(prefill("p", 9))
    assert refusal.value.kind is ErrorKind.OVERLOADED and s.num_sequences == 1
    s.cancel(resume("r", 9, 3).key)
    add(s, prefill("p", 9))
    with pytest.raises(TandemError) as refusal:
        s.add(resume("r", 9, 3))
    assert refusal.value.kind is ErrorKind.OVERLOADED and s.num_sequences == 1


def scored(job: Job, num_top: int = 1, **sampling: object) -> Job:
    params = replace(job.request.sampling, **sampling)  # type: ignore[arg-type]
    return replace(job, request=replace(job.request, sampling=params, prompt_logprobs=num_top))


def score(s: Scheduler) -> tuple[StepPlan, list[SequenceUpdate]]:
    """Plan and commit one step with prompt log probabilities."""
    planned = s.plan().step
    assert planned is not None
    results = [SliceResult(p.seq, (SampledToken(50),) if p.sampling else (),
                           scores=tuple(SampledToken(t, -1.0) for t in p.scored)) for p in planned.slices]  # fmt: skip
    progress = s.commit(StepResult(planned.number, tuple(results)))
    s.check()
    return planned, progress


def test_a_scored_prompt_takes_no_hits_but_leaves_its_blocks_to_others() -> None:
    s = scheduler(num_blocks=20, budget=4)
    add(s, generate("a", 7, 1))
    while s.num_sequences:
        step(s)
    add(s, scored(generate("b", 7, 1, text="a"), num_top=3))
    first, progress = score(s)
    (piece,) = first.slices
    prompt = generate("a", 7, 1).request.prompt_tokens
    assert (piece.start, piece.num_tokens, piece.scored, piece.num_top) == (0, 4, prompt[1:5], 3)
    assert [(p.first_scored, len(p.scores)) for p in progress] == [(1, 4)]
    second, progress = score(s)
    (piece,) = second.slices
    assert (piece.start, piece.scored, piece.sampling is not None) == (4, prompt[5:], True)
    assert [(p.first_scored, len(p.scores), len(p.tokens), p.num_cached) for p in progress] == [(5, 2, 1, 0)]
    add(s, generate("c", 7, 1, text="a"))
    assert score(s)[0].slices[0].start == 6


def test_a_preempted_prompt_is_not_scored_again() -> None:
    s = scheduler(num_blocks=5)
    add(s, generate("old", 3, 7), scored(generate("a", 3, 4)))
    starts: list[int] = []
    seen: list[tuple[int, int]] = []
    while s.num_sequences:
        planned, progress = score(s)
        starts += [piece.start for piece in planned.slices if piece.seq == 1]
        seen += [(p.first_scored, len(p.scores)) for p in progress if p.scores]
    assert starts.count(0) == 2, "it was computed again from the start"
    assert seen == [(1, 2)]


def test_sampling_with_penalties_waits_and_gets_the_earlier_tokens() -> None:
    s = scheduler()
    add(s, generate("a", 3, 5))
    job = generate("b", 3, 5)
    sampling = replace(job.request.sampling, presence_penalty=1.0)
    add(s, replace(job, request=replace(job.request, sampling=sampling), output_tokens=(7, 8)))
    first, second = s.plan().step, s.plan().step
    assert first is not None and names(s, first) == ["a", "b"] and names(s, second) == ["a"]
    samplings = [piece.sampling for piece in first.slices]
    assert samplings[0] is not None and (samplings[0].prompt, samplings[0].output) == ((), ())
    assert samplings[1] is not None
    assert (samplings[1].prompt, samplings[1].output) == (job.request.prompt_tokens, (7, 8))
    finish(s, first)
    third = s.plan().step
    assert third is not None and names(s, third) == ["a", "b"]
    (looks_back,) = [piece for piece in third.slices if piece.tokens]
    assert looks_back.sampling is not None and looks_back.sampling.output == (7, 8, 50) and not looks_back.chained
    s.check()


@pytest.mark.parametrize("num_prompt", [1, 2, 9])
def test_a_prompt_alone_ends_when_it_is_computed(num_prompt: int) -> None:
    s = scheduler(budget=4)
    add(s, generate("a", num_prompt, 0), generate("b", num_prompt, 0))
    ended: list[SequenceUpdate] = []
    while s.num_sequences:
        assert s.run(5) is None
        first, second = s.plan().step, s.plan().step
        for open_plan in (first, second):
            if open_plan is not None:
                assert all(piece.sampling is None for piece in open_plan.slices)
                ended += [p for p in finish(s, open_plan) if p.has_ended]
    assert [(p.finish, p.num_output, p.num_computed) for p in ended] == [(FinishReason.LENGTH, 0, num_prompt)] * 2
    s.check()
    assert s.pool.num_free == 10


@pytest.mark.parametrize("job", [generate("a", 3, 5), prefill("p", 3)], ids=["generate", "prefill"])
@pytest.mark.parametrize("num_choices", [1, 3])
def test_an_output_that_is_complete_before_its_first_token_ends_each_choice(job: Job, num_choices: int) -> None:
    s = scheduler()
    add(s, replace(job, num_choices=num_choices))
    planned = s.plan().step
    assert planned is not None
    (piece,) = planned.slices
    (progress,) = s.commit(StepResult(planned.number, (SliceResult(piece.seq, is_complete=True),)))
    assert [(part.key.choice, part.tokens, part.finish, part.handed_over) for part in progress.parts] == [
        (choice, (), FinishReason.STOP, False) for choice in range(num_choices)
    ]
    assert progress.finish is FinishReason.STOP and not progress.handed_over and s.num_sequences == 0


@pytest.mark.parametrize(
    "more",
    [{"presence_penalty": 0.5}, {"logit_bias": ((3, 1.0),)}, {"min_tokens": 9}, {"logprobs": 0}],
    ids=lambda more: next(iter(more)),
)
def test_a_step_after_host_sampling_is_planned_only_after_its_token(more: dict[str, object]) -> None:
    """The next step may be chained only to tokens that the device samples itself."""
    s = scheduler()
    job = generate("a", 3, 9)
    s.add(replace(job, request=replace(job.request, sampling=replace(job.request.sampling, **more))))  # type: ignore[arg-type]
    s.add(generate("b", 3, 9))
    first = s.plan().step
    assert names(s, first) == ["a", "b"]
    second = s.plan().step
    assert names(s, second) == ["b"] and second is not None and second.slices[0].chained
    finish(s, first)
    third = s.plan().step
    assert sorted(names(s, third)) == ["a", "b"]
    s.check()


def test_sampling_returns_to_the_device_after_min_tokens() -> None:
    s = scheduler()
    job = generate("a", 3, 9)
    s.add(replace(job, request=replace(job.request, sampling=replace(job.request.sampling, min_tokens=2))))
    chained: list[bool] = []
    open_plans: list[StepPlan] = []
    for _ in range(12):
        step = s.plan().step
        if step is not None:
            chained.append(step.slices[0].chained)
            open_plans.append(step)
        if len(open_plans) == 2 or step is None:
            finish(s, open_plans.pop(0))
    assert chained[:5] == [False, False, False, True, True]


def test_a_prompt_is_retained_for_the_time_that_its_request_names() -> None:
    s = scheduler(budget=4, retained=5)
    kept = replace(request("kept", 9, 3), retain_s=60.0, max_retained_tokens=6)
    s.add(GenerateJob(request=kept, attempt=1), 0.0)
    add(s, generate("other", 9, 3))
    while (planned := s.plan(0.0)).step is not None:
        sampled = (SampledToken(50),)
        slices = tuple(SliceResult(p.seq, sampled if p.sampling else ()) for p in planned.step.slices)
        s.commit(StepResult(planned.step.number, slices), 10.0)
    assert s.pool.num_retained == 3, "of four full blocks of the prompt as many as the tenant may have"
    for name in "xyz":
        add(s, generate(name, 13, 1))
        while step(s)[0]:
            pass
    assert s.pool.count_hits(chain_hashes(root_hash("model", 2, ""), kept.prompt_tokens, 2)) == 3
    s.pool.end_retentions(69.0)
    assert s.pool.num_retained == 3
    s.pool.end_retentions(70.0)
    assert s.pool.num_retained == 0


def test_a_pulled_sequence_computes_what_its_source_had_no_kv_of() -> None:
    s = scheduler(num_blocks=20)
    job = replace(resume("r", 5, max_tokens=9), output_tokens=(50, 50, 50))
    add(s, job)
    s.on_producer_ready(job.key)
    s.plan()
    s.kv_arrived(job.key, (), 0, 4)
    plan = s.plan().step
    (piece,) = plan.slices if plan is not None else pytest.fail("nothing is planned")
    assert (piece.start, piece.num_tokens) == (4, 4)
    (update,) = finish(s, plan)
    assert (update.first_index, len(update.tokens)) == (3, 1)
    late = replace(resume("late", 5, max_tokens=9), output_tokens=(50,))
    add(s, late)
    s.on_producer_ready(late.key)
    s.plan()
    s.kv_arrived(late.key, (), 0, 6)
    pieces = {piece.seq: piece for piece in (s.plan().step or pytest.fail("nothing is planned")).slices}
    assert pieces[s.state.by_key[late.key].id].start == 5, "one token at least, although its source had all of its KV"
