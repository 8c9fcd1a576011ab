"""One simulated worker does between steps what the real driver does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from tandem.core.config import Bytes, Config, EngineConfig, SloConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, SampledToken, Token
from tandem.core.ids import RequestId
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.engine.effects import Effect
from tandem.sim.cluster.worker import SimWorker, StepRun
from tandem.sim.cost.model_shapes import SHAPES
from tandem.sim.cost.residuals import always
from tandem.sim.kernel.event_queue import Actor, SimEventQueue
from tests.simulation.clusters import LAPTOP, slow_spec

PARTY = Actor(0)


class Notes:
    """An `Outlet` that records its calls, with the time."""

    def __init__(self, agenda: SimEventQueue) -> None:
        self._agenda = agenda
        self.effects: list[tuple[float, Effect]] = []
        self.loads: list[WorkerLoad] = []

    def dispatch(self, worker: SimWorker, effects: Sequence[Effect], load: WorkerLoad | None) -> None:
        self.effects += [(self._agenda.now, effect) for effect in effects]
        if load is not None:
            self.loads.append(load)

    def stream(self, worker: SimWorker, stretch: StepRun) -> None:
        for i, end in enumerate(stretch.ends):
            for one in stretch.tokens:
                token = SampledToken(one.ids[i])
                self.effects.append((end, Token(one.key, one.first_index + i, token)))

    def times(self, name: str, kind: type[Token] | type[Finished]) -> list[float]:
        return [time for time, effect in self.effects if isinstance(effect, kind) and effect.key.request == name]


def job(name: str, num_prompt: int, max_tokens: int = 1) -> GenerateJob:
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Request(id=RequestId(name), model="m", prompt_tokens=(ord(name),) * num_prompt, sampling=sampling)
    return GenerateJob(request=request, attempt=1)


def rig(num_blocks: int = 2000) -> tuple[SimEventQueue, Notes, SimWorker]:
    agenda = SimEventQueue()
    notes = Notes(agenda)
    return agenda, notes, SimWorker(agenda, slow_spec(num_blocks=num_blocks), "w", notes, seed=0, party=PARTY)


def test_commands_that_arrive_during_a_step_wait_for_its_end() -> None:
    agenda, notes, worker = rig()
    answered: list[float] = []
    agenda.at(0.0, "a", lambda: worker.submit(job("a", 100), lambda *_: answered.append(agenda.now)), by=PARTY)
    agenda.at(0.05, "b", lambda: worker.submit(job("b", 50), lambda *_: answered.append(agenda.now)), by=PARTY)
    agenda.run()
    first = LAPTOP.base_s + LAPTOP.chunk_s(0, 100)
    assert answered == [0.0, pytest.approx(first)]
    assert notes.times("a", Finished) == [pytest.approx(first)]
    assert notes.times("b", Finished) == [pytest.approx(first + LAPTOP.base_s + LAPTOP.chunk_s(0, 50))]
    assert worker.busy_s == pytest.approx(agenda.now) and worker.num_steps == 2


def test_a_refusal_is_answered_and_leaves_nothing() -> None:
    agenda, _, worker = rig(num_blocks=4)
    answers: list[TandemError | None] = []
    agenda.at(0.0, "a", lambda: worker.submit(job("a", 500), lambda refusal, _: answers.append(refusal)), by=PARTY)
    agenda.run()
    (refusal,) = answers
    assert refusal is not None and refusal.kind is ErrorKind.CONTEXT_LENGTH
    assert worker.is_idle and worker.num_steps == 0


def test_a_cancel_between_two_steps_ends_the_stream_there() -> None:
    agenda, notes, worker = rig()
    agenda.at(0.0, "a", lambda: worker.submit(job("a", 100, max_tokens=500), lambda *_: None), by=PARTY)
    agenda.at(0.3, "cancel", lambda: worker.post(lambda engine, now: engine.cancel(job("a", 100).key, now)), by=PARTY)
    agenda.run()
    # The step that runs at 0.3 s still ends; the cancel waits for it and comes before the next is planned.
    assert agenda.now < 0.3 + LAPTOP.base_s + 2 * LAPTOP.decode_seq_s + 0.05
    assert 2 <= len(notes.times("a", Token)) < 20 and not notes.times("a", Finished)
    assert worker.is_idle
    worker.engine.check()


def test_a_load_is_reported_when_it_has_changed() -> None:
    agenda, notes, worker = rig()
    agenda.at(0.0, "a", lambda: worker.submit(job("a", 100, max_tokens=8), lambda *_: None), by=PARTY)
    agenda.run()
    assert all(a != b for a, b in pairwise(notes.loads))
    assert max(load.num_running for load in notes.loads) == 1
    assert notes.loads[-1] == worker.engine.load() and notes.loads[-1].num_running == 0


@pytest.mark.parametrize("num_host_slots", [0, 200])
def test_prompts_that_take_turns_find_their_beginnings_in_host_memory(num_host_slots: int) -> None:
    """Three prompts of 62 blocks on a pool of 100, one after another and round about, twice."""
    agenda, notes = SimEventQueue(), Notes(SimEventQueue())
    layout = SHAPES["smollm2-135m"].layout(16)
    config = Config(engine=EngineConfig(host_cache_memory=Bytes(num_host_slots * layout.block_bytes)))
    spec = slow_spec(num_blocks=100, config=config, host_bandwidth=1e9)
    worker = SimWorker(agenda, spec, "w", notes, seed=0, party=PARTY)
    for i in range(6):
        one = job("abc"[i % 3], 1000, max_tokens=40)
        one = replace(one, request=replace(one.request, id=RequestId(f"{i}")))
        agenda.at(10.0 * i, str(i), lambda one=one: worker.submit(one, lambda *_: None), by=PARTY)  # type: ignore[misc]
    agenda.run()
    worker.engine.check()
    ends = [e for _, e in notes.effects if isinstance(e, Finished)]
    hit = 992 if num_host_slots else 0
    assert [end.num_cached_tokens for end in ends] == [0, 0, 0, hit, hit, hit]
    assert worker.num_prefill_tokens == 6 * 1000 - 3 * hit


def test_the_published_step_cost_does_not_depend_on_lookahead() -> None:
    def published_costs(max_run: int) -> list[StepCost | None]:
        agenda = SimEventQueue()
        config = Config(slo=SloConfig(ttft_ms=500.0))
        spec = slow_spec(config=config, residuals=always(0.5, 1.0, 3.0), max_run=max_run)
        worker = SimWorker(agenda, spec, "w", Notes(agenda), seed=0, party=PARTY)
        seen: list[StepCost | None] = []
        for i, name in enumerate("abcdef"):
            one = job(name, 100, max_tokens=40)
            agenda.at(0.5 * i, name, partial(worker.submit, one, lambda *_: None), by=PARTY)
        for i in range(400):
            agenda.at(0.01 * i, "", lambda: seen.append(worker.step_cost), by=PARTY)
        agenda.run()
        return seen

    assert len(set(published_costs(1))) > 2, "it has learned"
    assert published_costs(64) == published_costs(1)
