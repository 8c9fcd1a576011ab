"""Where the time of a request goes whose choices have gone their own ways."""

from __future__ import annotations

from tandem.core.ids import HandoffId, RequestId
from tandem.core.request import Request, SamplingParams
from tandem.flow.choice import Choice
from tandem.flow.course import Course
from tandem.flow.ledger import LedgerPhase
from tandem.flow.strand import Phase, Strand


def decoding() -> Strand:
    strand = Strand((0, 1))
    strand.phase, strand.drawn = Phase.RUNNING, LedgerPhase.DECODE
    return strand


def test_a_choice_that_goes_its_own_way_has_drawn_what_it_drew() -> None:
    assert decoding().split(1).ledger_phase is LedgerPhase.DECODE


def test_a_request_decodes_for_as_long_as_one_of_its_choices_does() -> None:
    request = Request(
        id=RequestId("r"), model="m", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=1), num_choices=2
    )
    course = Course(request, HandoffId("h"), {0: Choice(), 1: Choice()})
    course.strands = [Strand((1,)), decoding()]
    assert course.ledger_phase is LedgerPhase.DECODE
    course.strands = [Strand((1,)), Strand((0,))]
    assert course.ledger_phase is LedgerPhase.QUEUE
    course.strands = []
    assert course.ledger_phase is LedgerPhase.DELIVER
