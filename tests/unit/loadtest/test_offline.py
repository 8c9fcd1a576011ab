"""The offline runner with a model whose tokens show every mistake, on a clock that only steps and sleeps move."""

from __future__ import annotations

import pytest

from loadtest.client.workloads import BenchRequest, Workload
from loadtest.engine.offline import OfflineEngine
from tandem.core.config import Config, EngineConfig
from tandem.sched.state.step_plan import StepPlan
from tests.unit.worker.fake_model import BLOCK_SIZE, FakeExecutor, continuation, fake_model

STEP_S = 0.01


class FakeTime:
    def __init__(self) -> None:
        self.time = 50.0

    def now(self) -> float:
        return self.time

    def pass_by(self, seconds: float) -> None:
        self.time += seconds


def engine(num_blocks: int = 64, budget: int = 16) -> tuple[OfflineEngine, FakeExecutor, FakeTime]:
    time = FakeTime()
    model, executor = fake_model(num_blocks)
    executor.before_step = lambda plan: time.pass_by(STEP_S)
    settings = EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=budget, max_num_seqs=8)
    return OfflineEngine(Config(engine=settings), model, time, time.pass_by), executor, time


def bench_request(name: str, length: int, max_tokens: int, due_s: float = 0.0) -> BenchRequest:
    prompt = tuple((len(name) * 31 + ord(name[-1]) * 7 + i) % 997 for i in range(length))
    return BenchRequest(name=name, group="g", prompt=prompt, max_tokens=max_tokens, due_s=due_s)


def workload(*requests: BenchRequest, is_sequential: bool = False) -> Workload:
    return Workload(name="w", seed=0, turn=0, requests=requests, is_sequential=is_sequential)


def test_every_answer_is_the_models_own() -> None:
    offline, _, _ = engine()
    requests = [bench_request("a", 5, 7), bench_request("b", 33, 3), bench_request("c", 12, 9)]
    run = offline.run(workload(*requests))
    assert [record.name for record in run.records] == ["a", "b", "c"]
    for one, record in zip(requests, run.records, strict=True):
        assert list(record.tokens or ()) == continuation(one.prompt, one.max_tokens)
        assert (record.error, len(record.stamps_s)) == ("", one.max_tokens)
    assert run.failures == []
    offline.engine.check()
    assert offline.engine.is_idle


def test_steps_report_their_tokens_and_add_up() -> None:
    offline, _, _ = engine(budget=16)
    run = offline.run(workload(bench_request("a", 40, 5)))
    assert [step.num_prefill_tokens for step in run.steps[:3]] == [16, 16, 8]
    assert [step.num_decodes for step in run.steps[3:]] == [1, 1, 1, 1]
    assert sum(step.total_s for step in run.steps) == pytest.approx(len(run.steps) * STEP_S)
    assert run.wall_s == pytest.approx(len(run.steps) * STEP_S)


def test_requests_enter_when_they_are_due_and_not_before() -> None:
    offline, executor, time = engine()
    began, first = time.now(), {}

    def step(plan: StepPlan) -> None:
        for piece in plan.slices:
            first.setdefault(piece.seq, time.now() - began)
        time.pass_by(STEP_S)

    executor.before_step = step
    run = offline.run(workload(bench_request("late", 4, 2, due_s=3.0), bench_request("now", 4, 2)))
    by_name = {record.name: record for record in run.records}
    assert sorted(first.values()) == [pytest.approx(0.0), pytest.approx(3.0, abs=0.001)]
    assert by_name["late"].ttft_s == pytest.approx(STEP_S, abs=0.001)


def test_a_request_during_a_step_waits_for_its_end_and_its_ttft_includes_it() -> None:
    offline, executor, time = engine()
    executor.before_step = lambda plan: time.pass_by(1.0)
    run = offline.run(workload(bench_request("first", 4, 1), bench_request("second", 4, 1, due_s=0.25)))
    second = run.records[1]
    assert second.lateness_s == pytest.approx(0.75)
    assert second.ttft_s == pytest.approx(1.75)


def test_a_sequence_runs_one_at_a_time() -> None:
    offline, executor, time = engine()
    most = 0

    def step(plan: StepPlan) -> None:
        nonlocal most
        most = max(most, len(plan.slices))
        time.pass_by(STEP_S)

    executor.before_step = step
    run = offline.run(workload(bench_request("a", 4, 3), bench_request("b", 4, 3), is_sequential=True))
    assert most == 1
    assert [record.ttft_s for record in run.records] == [pytest.approx(STEP_S)] * 2


def test_a_step_that_fails_fails_the_run() -> None:
    offline, executor, _ = engine()

    def broken(plan: StepPlan) -> None:
        executor.pool[:, 1] = 999

    executor.before_step = broken
    run = offline.run(workload(bench_request("a", 20, 4)))
    assert run.failures == ["a: the KV of another position"]


def test_the_same_workload_twice_gives_the_same_answers() -> None:
    offline, _, _ = engine()
    requests = workload(bench_request("a", 20, 4), bench_request("b", 9, 6))
    first, second = offline.run(requests), offline.run(requests)
    assert [record.tokens for record in first.records] == [record.tokens for record in second.records]
