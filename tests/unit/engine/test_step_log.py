"""Test that step logs are decoded as they were encoded, and that anything else is rejected with its line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import Config, EngineConfig
from tandem.core.errors import TandemError
from tandem.core.step_cost import StepFeatures
from tandem.engine.step_log import (
    LoggedStep,
    StepLogHead,
    decode_log,
    encode_head,
    encode_step,
    step_settings,
)
from tandem.kv.layout import KVGroup, KVLayout
from tandem.sched.state.schedule_result import StepRecord

CONFIG = Config(engine=EngineConfig(max_num_batched_tokens=256, enable_chunked_prefill=False))
HEAD = StepLogHead(
    worker="w-1",
    pool="mixed",
    model="m",
    num_threads=2,
    num_blocks=100,
    layout=KVLayout(16, (KVGroup(30, 3, 64, "float32"),)),
    settings=step_settings(CONFIG),
)


def record(number: int = 0, measured_s: float = 0.25) -> StepRecord:
    return StepRecord(
        number=number,
        features=StepFeatures(100, 2, 512, 5050),
        predicted_s=0.5,
        measured_s=measured_s,
        target_s=0.0,
        num_budget_tokens=512,
        num_preempted=1,
        has_failed=False,
    )


def lines(*steps: LoggedStep) -> list[str]:
    return [encode_head(HEAD) + "\n", *(encode_step(step) + "\n" for step in steps)]


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 10**9), st.booleans()), max_size=5))
def test_round_trip(samples: list[tuple[int, int, bool]]) -> None:
    steps = tuple(
        LoggedStep(
            number / 1e6,
            replace(
                record(number, micro / 1e6),
                features=StepFeatures(number % 7, number % 5, number, number),
                predicted_s=micro / 1e6,
                target_s=0.04,
                num_budget_tokens=number % 512,
                num_preempted=number % 3,
                has_failed=failed,
            ),
        )
        for number, micro, failed in samples
    )
    log = decode_log(lines(*steps), "steps")
    assert log.steps == steps
    assert (log.head.worker, log.head.pool, log.head.layout) == (HEAD.worker, HEAD.pool, HEAD.layout)
    assert log.head.config == CONFIG


def test_a_line_that_was_cut_is_left_out() -> None:
    whole = LoggedStep(1.0, record())
    text = lines(whole, LoggedStep(2.0, record(1)))
    text[-1] = text[-1][:20]
    assert decode_log(text, "steps").steps == (whole,)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("[]\n", "line 3"),
        ("{}\n", "KeyError"),
        ("nothing\n", "JSONDecodeError"),
        (encode_step(LoggedStep(1.0, record(measured_s=-1.0))) + "\n", "a step took -1.0 s"),
        (encode_step(LoggedStep(1.0, record())).replace('"decode_seqs": 2', '"decode_seqs": -2') + "\n", "seqs=-2"),
        (encode_step(LoggedStep(1.0, record())).replace('"decode_seqs": 2', '"decode_seqs": 1e999') + "\n", "infinity"),
    ],
)
def test_what_is_no_step_is_refused_with_its_line(line: str, what: str) -> None:
    with pytest.raises(TandemError, match=r"steps\.jsonl, line 3") as refused:
        decode_log([*lines(LoggedStep(1.0, record())), line], "steps.jsonl")
    assert what in refused.value.message


@pytest.mark.parametrize(
    "change",
    [
        {"format": "tandem-steps-0"},
        {"layout": {}},
        {"layout": {**HEAD.layout.to_dict(), "block_size": 0}},
        {"layout": {**HEAD.layout.to_dict(), "layers": "30"}},
        {"layout": {**HEAD.layout.to_dict(), "dtype": "float3"}},
        {"num_blocks": 0},
        {"settings": {"engine": {"x": 1}}},
        {"settings": {"engine": {"block_size": "x"}}},
    ],
)
def test_what_is_no_head_is_refused(change: dict[str, object]) -> None:
    head = json.dumps({**json.loads(encode_head(HEAD)), **change}) + "\n"
    with pytest.raises(TandemError, match=r"steps\.jsonl, line 1"):
        decode_log([head], "steps.jsonl")


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(TandemError, match="line 1: is empty"):
        decode_log([], "steps.jsonl")
