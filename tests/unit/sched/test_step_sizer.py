"""Test which features of a plan are kept until its step has been timed."""

from __future__ import annotations

import pytest

from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, SeqId
from tandem.core.request import SamplingParams
from tandem.sched.budget.step_sizer import StepSizer
from tandem.sched.state.step_plan import Sampling, ScheduledSlice, SliceResult, StepPlan, StepResult


@pytest.mark.parametrize("num_drafted", [0, 3])
def test_draft_tokens_are_reported_beside_their_cost(num_drafted: int) -> None:
    sampling = Sampling(SamplingParams(max_tokens=9), choice=0, index=0)
    decode = ScheduledSlice(
        SeqId(0), 4, 1 + num_drafted, (7,) * (1 + num_drafted), (BlockId(0),), sampling, num_drafted=num_drafted
    )
    prompt = ScheduledSlice(SeqId(1), 0, 5, (1,) * 5, (BlockId(1),), None)
    pacer = StepSizer(16)
    pacer.planned(StepPlan(0, (decode, prompt)))
    result = StepResult(0, (SliceResult(SeqId(0), (SampledToken(7),)), SliceResult(SeqId(1))))
    record = pacer.measured(result, 0.1)
    assert (record.num_drafted, record.features.num_prefill_tokens) == (num_drafted, 5 + num_drafted)
