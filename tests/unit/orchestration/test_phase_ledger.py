"""Test that the nine stages of a request add up to its time, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.request_stages import JobStages, Stage, Wait, WaitCause
from tandem.orchestration.phase_ledger import LedgerPhase, PhaseLedger, StageSeconds

P = LedgerPhase


def walked(*moves: tuple[LedgerPhase, float]) -> PhaseLedger:
    ledger = PhaseLedger(100.0)
    for phase, at in moves:
        ledger.move(phase, 100.0 + at)
    return ledger


SPLIT = (
    (P.QUEUE, 1.0),
    (P.ROUTE, 3.0),
    (P.FIRST, 3.5),
    (P.HANDOVER, 8.5),
    (P.DECODE, 10.0),
    (P.DELIVER, 14.0),
    (P.OVER, 15.0),
)


def test_a_split_request() -> None:
    ledger = walked(*SPLIT)
    ledger.add_job_stages(1, JobStages(prefill_queue_s=1.5, prefill_s=3.0))
    ledger.add_job_stages(1, JobStages(transfer_s=0.75, decode_queue_s=0.25, decode_s=0.25))
    assert ledger.seconds(1e9) == StageSeconds(
        receive=1.0,
        queue=2.0,
        route=0.5,
        prefill_queue=1.5,
        prefill=3.0,
        transfer=0.75,
        decode_queue=0.25,
        decode=0.25 + 4.0,
        deliver=1.0 + 0.5 + 0.25,
    )


def test_the_order_of_reports_changes_nothing() -> None:
    words = [JobStages(prefill_queue_s=1.5, prefill_s=3.0), JobStages(0.0, 0.0, 0.75, 0.25, 0.25)]
    ledgers = [walked(*SPLIT), walked(*SPLIT)]
    for report in words:
        ledgers[0].add_job_stages(1, report)
    for report in reversed(words):
        ledgers[1].add_job_stages(1, report)
    assert ledgers[0].seconds(0.0) == ledgers[1].seconds(0.0)


def test_waits_explain_the_stages_in_which_a_request_waits() -> None:
    ledger = walked(*SPLIT)
    ledger.add_queue_waits([Wait(Stage.QUEUE, WaitCause.NO_ROOM, 1.5)])
    ahead, seat = (
        Wait(Stage.PREFILL_QUEUE, WaitCause.PROMPTS_AHEAD, 0.5, 900),
        Wait(Stage.PREFILL_QUEUE, WaitCause.SEAT, 0.75),
    )
    blocks = Wait(Stage.TRANSFER, WaitCause.BLOCKS, 0.25)
    reports = [
        JobStages(transfer_s=0.75, decode_queue_s=0.25, decode_s=0.25, waits=(blocks,)),
        JobStages(prefill_queue_s=1.5, prefill_s=3.0, waits=(ahead, seat)),
    ]
    for report in (*reports, reports[1]):
        ledger.add_job_stages(1, report)
    assert ledger.waits == (
        Wait(Stage.QUEUE, WaitCause.TURN, 0.5),
        Wait(Stage.QUEUE, WaitCause.NO_ROOM, 1.5),
        ahead,
        seat,
        Wait(Stage.PREFILL_QUEUE, WaitCause.STEP, 0.25),
        blocks,
        Wait(Stage.TRANSFER, WaitCause.PULL, 0.5),
        Wait(Stage.DECODE_QUEUE, WaitCause.STEP, 0.25),
    )


def test_waits_of_all_attempts_add_up() -> None:
    ledger = walked(*SPLIT)
    for attempt, seconds in ((1, 0.25), (2, 0.5)):
        waits = (Wait(Stage.PREFILL_QUEUE, WaitCause.PROMPTS_AHEAD, seconds, 100 * attempt),)
        ledger.add_job_stages(attempt, JobStages(prefill_queue_s=seconds, waits=waits))
    assert ledger.waits[1:2] == (Wait(Stage.PREFILL_QUEUE, WaitCause.PROMPTS_AHEAD, 0.75, 200),)


def test_choices_wait_in_parallel() -> None:
    ledger = walked(*SPLIT)
    for seconds in (3.0, 2.0, 3.5):
        ledger.add_job_stages(1, JobStages(prefill_s=seconds))
    assert ledger.seconds(0.0).prefill == 3.5


def test_a_first_token_may_arrive_before_the_acceptance_of_its_job() -> None:
    ledger = walked((P.QUEUE, 0.0), (P.ROUTE, 1.0), (P.DECODE, 4.0), (P.OVER, 9.0))
    ledger.add_job_stages(1, JobStages(prefill_queue_s=0.5, prefill_s=2.0))
    assert ledger.seconds(0.0) == StageSeconds(queue=1.0, route=0.5, prefill_queue=0.5, prefill=2.0, decode=5.0)


def test_without_any_report() -> None:
    """Without reports, all of a phase counts for its largest stage."""
    stages = walked(*SPLIT).seconds(0.0)
    assert (stages.prefill_queue, stages.prefill) == (0.0, 5.0)
    assert (stages.transfer, stages.decode_queue, stages.decode) == (1.5, 0.0, 4.0)


def test_reports_are_limited_to_the_measured_time() -> None:
    ledger = walked(*SPLIT)
    ledger.add_job_stages(1, JobStages(prefill_queue_s=2.0, prefill_s=100.0, transfer_s=100.0, decode_s=1.0))
    stages = ledger.seconds(0.0)
    assert (stages.route, stages.prefill_queue, stages.prefill, stages.transfer) == (0.0, 2.0, 3.5, 1.5)
    assert stages.total == 15.0


def test_the_time_of_a_lost_attempt_is_not_divided_by_later_reports() -> None:
    ledger = walked(
        (P.QUEUE, 0.0), (P.ROUTE, 0.0), (P.FIRST, 0.0), (P.QUEUE, 7.0), (P.ROUTE, 8.0), (P.FIRST, 8.0), (P.DECODE, 10.0)
    )
    ledger.add_job_stages(2, JobStages(prefill_queue_s=0.5, prefill_s=1.0))
    stages = ledger.seconds(110.0)
    assert (stages.queue, stages.prefill_queue, stages.prefill, stages.deliver) == (1.0, 0.5, 1.0 + 7.0, 0.5)
    ledger.move(P.QUEUE, 111.0)  # while it decodes nothing is lost: the client has the tokens
    assert ledger.seconds(111.0).decode == 1.0


def test_a_failed_kv_transfer_counts_its_time() -> None:
    ledger = walked((P.FIRST, 0.0), (P.HANDOVER, 1.0), (P.QUEUE, 4.0), (P.FIRST, 4.0), (P.DECODE, 5.0), (P.OVER, 5.0))
    ledger.add_job_stages(1, JobStages(prefill_s=1.0))
    ledger.add_job_stages(2, JobStages(prefill_s=1.0))
    assert (ledger.seconds(0.0).transfer, ledger.seconds(0.0).prefill) == (3.0, 2.0)


def test_time_after_the_end_does_not_count() -> None:
    ledger = walked(*SPLIT)
    ledger.move(P.DECODE, 200.0)
    assert ledger.phase is P.OVER and ledger.seconds(300.0).total == 15.0


def test_stages_have_their_names() -> None:
    assert StageSeconds._fields == tuple(stage.value for stage in Stage)
    assert StageSeconds(*range(9)).of(Stage.TRANSFER) == 5.0


seconds = st.floats(0.0, 1e4)
stages = st.builds(JobStages, seconds, seconds, seconds, seconds, seconds)


@given(
    st.lists(st.tuples(st.sampled_from([phase for phase in P if phase is not P.OVER]), seconds)),
    st.lists(st.tuples(st.integers(1, 3), stages)),
    seconds,
)
def test_the_stages_always_add_up(
    moves: list[tuple[LedgerPhase, float]], words: list[tuple[int, JobStages]], rest: float
) -> None:
    ledger, now = PhaseLedger(50.0), 50.0
    for phase, step in moves:
        now += step
        ledger.move(phase, now)
    for attempt, report in words:
        ledger.add_job_stages(attempt, report)
    for is_over in (False, True):
        if is_over:
            ledger.move(P.OVER, now + rest)
        stages = ledger.seconds(now + rest)
        assert min(stages) >= 0.0
        assert stages.total == pytest.approx(now + rest - 50.0, abs=1e-6)


def test_the_seconds_at_workers_are_those_of_all_attempts() -> None:
    ledger = walked((P.QUEUE, 1.0), (P.ROUTE, 3.0), (P.FIRST, 3.5), (P.QUEUE, 8.0), (P.ROUTE, 20.0), (P.FIRST, 21.0))
    assert ledger.worker_seconds(102.0) == 6.0, "clocks do not go back"
    assert ledger.worker_seconds(122.0) == 7.0
    for phase, at in ((P.HANDOVER, 23.0), (P.DECODE, 24.0), (P.DELIVER, 30.0), (P.OVER, 31.0)):
        ledger.move(phase, 100.0 + at)
    assert ledger.worker_seconds(1e9) == 5.0 + 10.0
