"""Test the ledger phase of a request whose choices have been split."""

from __future__ import annotations

from tandem.core.ids import HandoffId, RequestId
from tandem.core.request import Request, SamplingParams
from tandem.orchestration.attempts import Attempts
from tandem.orchestration.client_state import Choice
from tandem.orchestration.job_group import JobGroup, JobGroupPhase
from tandem.orchestration.phase_ledger import LedgerPhase


def decoding() -> JobGroup:
    job_group = JobGroup({0, 1})
    job_group.phase, job_group.progress = JobGroupPhase.RUNNING, LedgerPhase.DECODE
    return job_group


def test_a_split_choice_keeps_its_progress() -> None:
    assert decoding().split(1).ledger_phase is LedgerPhase.DECODE


def test_a_request_decodes_for_as_long_as_one_of_its_choices_does() -> None:
    request = Request(
        id=RequestId("r"), model="m", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=1), num_choices=2
    )
    attempts = Attempts(request, HandoffId("h"), {0: Choice(), 1: Choice()})
    attempts.job_groups = [JobGroup({1}), decoding()]
    assert attempts.ledger_phase is LedgerPhase.DECODE
    attempts.job_groups = [JobGroup({1}), JobGroup({0})]
    assert attempts.ledger_phase is LedgerPhase.QUEUE
    attempts.job_groups = []
    assert attempts.ledger_phase is LedgerPhase.DELIVER
