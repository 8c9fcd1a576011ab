"""Test when the request director moves a preempted choice to a worker with room, and how that move ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import KVReceived, MigrationOffered, Pauses, Preempted, Preemption, SampledToken, Token
from tandem.core.ids import HandoffId, HandoffKey, JobKey, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import ResumeJob
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.orchestration.commands import Command, MoveOutcome, OfferMigration, ReleaseLease, SubmitJob
from tandem.orchestration.rebalancer import HOLD_S, MAX_EXAMINED, PAUSE_S, Rebalancer
from tandem.routing.link_bandwidth import LinkBandwidth
from tandem.routing.rebalance import Rebalancing
from tandem.routing.worker_view import WorkerView
from tests.unit.orchestration.decoding_requests import A, B, C, DecodingRequests, outcomes

NUM_OUTPUT = 40
SEATS = 4


def view(ref: WorkerRef, num_running: int) -> WorkerView:
    load = WorkerLoad(num_running=num_running, num_blocks=1000, num_free_blocks=900)
    cost = StepCost(1e-3, 1e-3, 0.0, 0.0, 0.0)
    return WorkerView(
        ref, "mixed", "m", "f", load, step_cost=cost, block_size=16, block_bytes=1 << 10, max_num_seqs=SEATS
    )


class Setting(DecodingRequests):
    """Some batch requests of 60 prompt tokens and 40 output tokens that worker A has preempted, while B has room."""

    def __init__(
        self, rebalance: str = "on", choices: Sequence[int] = (1,), max_moves: int = 1, lanes: Sequence[Lane] = ()
    ) -> None:
        config = GatewayConfig(rebalance=rebalance, rebalance_max_moves=max_moves)  # type: ignore[arg-type]
        super().__init__(view(A, 0), config)
        sizes = {"num_prompt": 60, "num_output": NUM_OUTPUT, "max_tokens": 100}
        self.keys = [
            self.start(number, num_choices=num_choices, lane=lanes[number] if lanes else Lane.BATCH, **sizes)
            for number, num_choices in enumerate(choices)
        ]
        self.key = self.keys[0]
        self.workers.views[A] = view(A, SEATS)
        self.workers.add(view(B, 1))
        for key in self.keys:
            self.preempt(A, key, NUM_OUTPUT)

    def preempt(self, worker: WorkerRef, key: JobKey, next_index: int) -> None:
        assert self.director.on_worker_events(worker, [Preempted(key, next_index)], self.now) == []

    def wait(self, seconds: float = 2 * PAUSE_S, tick_s: float = 0.05) -> list[Command]:
        return super().wait(seconds, tick_s)

    def offer(self, number: int = 0) -> SubmitJob:
        """Let A offer the first choice, and return the job that takes it over."""
        offer = MigrationOffered(self.key, HandoffKey(HandoffId(f"move{number}"), self.key.attempt), is_requested=True)
        (submit,) = self.director.on_worker_events(A, [offer], self.now)
        assert isinstance(submit, SubmitJob) and isinstance(submit.job, ResumeJob)
        assert submit.job.source == A and submit.job.output_tokens == tuple(range(NUM_OUTPUT))
        return submit

    def resume(self) -> JobKey:
        """Let the first choice go on at B, and return its key there."""
        assert self.wait() == [OfferMigration(A, (self.key,))]
        taken = self.offer().job.key
        self.director.on_submit_result(B, taken, None, self.now)
        self.director.on_worker_events(B, [KVReceived(taken, 6, 6 << 10, 0, 0, 0.1, 0.1, 0.1)], self.now)
        return taken


def targets(setting: Setting) -> list[WorkerRef]:
    """Return the worker to which the first choice moves; empty where none is found in three seconds."""
    return [setting.offer().worker] if setting.wait(3.0) else []


def test_it_goes_on_where_there_is_room_and_its_pause_is_counted() -> None:
    setting = Setting()
    assert setting.wait(PAUSE_S / 2) == []
    taken = setting.resume()
    (open_request,) = setting.director.requests()
    assert open_request.ledger.pauses.num == 1 and PAUSE_S <= open_request.ledger.pauses.seconds <= 3 * PAUSE_S
    assert len(setting.tokens(B, taken, NUM_OUTPUT, NUM_OUTPUT + 2)) == 2
    assert open_request.state.path == "local;retries=1"
    assert outcomes(setting.wait()) == [MoveOutcome.RESUMED]


def test_a_pause_that_its_worker_has_reported_is_not_counted_twice() -> None:
    setting = Setting()
    setting.wait()
    taken = setting.offer().job.key
    pauses = Preemption(Pauses(1, 0.4))
    token = Token(setting.key, NUM_OUTPUT, SampledToken(NUM_OUTPUT), preemption=pauses)
    setting.director.on_worker_events(A, [token], setting.now)
    setting.director.on_submit_result(B, taken, None, setting.now)
    setting.director.on_worker_events(B, [KVReceived(taken, 6, 6 << 10, 0, 0, 0.1, 0.1, 0.1)], setting.now)
    setting.wait()
    (open_request,) = setting.director.requests()
    assert open_request.ledger.pauses == pauses.pauses


@pytest.mark.parametrize(("rebalance", "expected"), [("off", []), ("explain", [MoveOutcome.ADVISED])])
def test_without_rebalancing_it_waits_where_it_is(rebalance: str, expected: list[MoveOutcome]) -> None:
    setting = Setting(rebalance)
    commands = setting.wait(3.0) + setting.wait(3.0)
    assert outcomes(commands) == expected and len(commands) == len(expected)


def test_one_that_goes_on_in_time_stays_until_it_is_preempted_again() -> None:
    setting = Setting()
    setting.wait(PAUSE_S / 2)
    setting.tokens(A, setting.key, NUM_OUTPUT, NUM_OUTPUT + 1)
    assert setting.wait() == []
    setting.preempt(A, setting.key, NUM_OUTPUT)
    assert setting.wait() == [], "the worker repeats what it has reported when its stream is opened again"
    setting.preempt(A, setting.key, NUM_OUTPUT + 1)
    assert setting.wait() == [OfferMigration(A, (setting.key,))]


def test_a_repeated_report_does_not_begin_the_wait_anew() -> None:
    setting = Setting()
    for _ in range(2):
        setting.wait(PAUSE_S / 3)
        setting.preempt(A, setting.key, NUM_OUTPUT)
    assert setting.wait(PAUSE_S / 2) == [OfferMigration(A, (setting.key,))]


def test_a_report_that_overtakes_tokens_counts_once_they_have_arrived() -> None:
    setting = Setting()
    setting.tokens(A, setting.key, NUM_OUTPUT, NUM_OUTPUT + 1)
    setting.preempt(A, setting.key, NUM_OUTPUT + 3)
    assert setting.wait() == []
    setting.tokens(A, setting.key, NUM_OUTPUT + 1, NUM_OUTPUT + 3)
    assert setting.wait() == [OfferMigration(A, (setting.key,))]


@pytest.mark.parametrize(
    "blocked",
    [
        {"load": view(B, SEATS).load},
        {"load": replace(view(B, 1).load, num_waiting=1)},
        {"load": replace(view(B, 1).load, num_free_blocks=5)},
        {"num_inflight": SEATS - 1},
        {"lanes": frozenset({Lane.INTERACTIVE})},
        {"fingerprint": "other"},
        {"block_size": 32},
        {"model": "other"},
        {"pool": "prefill"},
        {"max_num_seqs": 0},
    ],
)
def test_it_waits_for_a_worker_that_can_take_it(blocked: dict[str, object]) -> None:
    setting = Setting()
    setting.workers.remove(B)
    setting.workers.add(replace(view(B, 1), **blocked))  # type: ignore[arg-type]
    assert targets(setting) == []
    setting.workers.add(view(C, 1))
    assert targets(setting) == [C]


def test_the_least_loaded_worker_gets_it() -> None:
    setting = Setting()
    setting.workers.add(view(C, 0))
    assert targets(setting) == [C]


def test_choices_of_one_request_stay_together() -> None:
    assert Setting(choices=[2]).wait(3.0) == []


def test_a_request_moves_so_often_and_no_more() -> None:
    setting = Setting()
    taken = setting.resume()
    setting.wait()
    setting.tokens(B, taken, NUM_OUTPUT, NUM_OUTPUT + 2)
    setting.workers.views[A] = view(A, 0)
    setting.preempt(B, taken, NUM_OUTPUT + 2)
    assert setting.wait(3.0) == []


def test_one_that_is_refused_keeps_its_place_and_is_offered_again_later() -> None:
    setting = Setting(max_moves=9)
    for number in range(3):
        began = setting.now
        assert setting.wait(HOLD_S + PAUSE_S) == [OfferMigration(A, (setting.key,))]
        assert setting.now - began >= HOLD_S - 0.1 or number == 0, "the pair rests after each refusal"
        submit = setting.offer(number)
        full = TandemError(ErrorKind.OVERLOADED, "full")
        (withdrawn,) = setting.director.on_submit_result(B, submit.job.key, full, setting.now)
        assert isinstance(withdrawn, ReleaseLease) and withdrawn.worker == A
        assert outcomes(setting.wait()) == [MoveOutcome.WITHDRAWN]
    assert len(setting.tokens(A, setting.key, NUM_OUTPUT, NUM_OUTPUT + 1)) == 1, "it may go on at A"
    setting.preempt(A, setting.key, NUM_OUTPUT + 1)
    assert setting.wait(HOLD_S + PAUSE_S) == [OfferMigration(A, (setting.key,))]


def test_a_worker_gives_and_gets_one_at_a_time() -> None:
    setting = Setting(choices=[1, 1, 1])
    assert setting.wait() == [OfferMigration(A, (setting.key,))]
    assert setting.wait(3.0) == []


def test_those_that_may_not_move_do_not_hold_up_the_others() -> None:
    setting = Setting(choices=[2] * (MAX_EXAMINED + 10) + [1])
    assert setting.wait(3.0) == [OfferMigration(A, (setting.keys[-1],))]


def test_an_excluded_worker_gets_none() -> None:
    setting = Setting()
    requests = {one.id: one.state for one in setting.director.requests()}
    rebalancer = Rebalancer(setting.workers.candidates(), Rebalancing({}, 0.2, LinkBandwidth()), 1)
    rebalancer.preempted(setting.key, NUM_OUTPUT, A, 0.0)
    assert rebalancer.plan_resumes(requests, {B}, 1.0) == []
    (move,) = rebalancer.plan_resumes(requests, set(), 1.0)
    assert (move.key, move.source, move.target, move.reason) == (setting.key, A, B, "preempted")


def test_the_most_urgent_lane_goes_first_and_in_it_who_waits_longest() -> None:
    setting = Setting(choices=[1, 1], lanes=[Lane.BATCH, Lane.STANDARD])
    assert setting.wait() == [OfferMigration(A, (setting.keys[1],))]
    setting = Setting(choices=[1, 1, 1])
    setting.wait(PAUSE_S / 2)
    setting.tokens(A, setting.keys[0], NUM_OUTPUT, NUM_OUTPUT + 1)
    setting.preempt(A, setting.keys[0], NUM_OUTPUT + 1)
    assert setting.wait() == [OfferMigration(A, (setting.keys[1],))]
