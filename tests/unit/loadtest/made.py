"""Records and step logs made by hand, for tests that add them up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.client.records import Record
from loadtest.load.load_report import LoadReport
from loadtest.load.stats_collector import StatsCollector
from tandem.core.config import Config
from tandem.core.step_cost import StepFeatures
from tandem.engine.step_log import LoggedStep, StepLogHead, encode_head, encode_step, step_settings
from tandem.kv.layout import KVGroup, KVLayout
from tandem.sched.state.schedule_result import StepRecord


def record(group: str, due_s: float, *gaps_s: float, ttft_s: float = 0.5, **changes: object) -> Record:
    """Tokens `ttft_s` after it was due, and then after each gap."""
    stamps = [due_s + ttft_s]
    for gap in gaps_s:
        stamps.append(stamps[-1] + gap)
    return stamped(group, due_s, stamps, **{"ended_s": stamps[-1], **changes})


def stamped(group: str, due_s: float, stamps_s: Sequence[float], **changes: object) -> Record:
    """A token at each of these times."""
    facts: dict[str, object] = {
        "name": f"{group}-{due_s:g}",
        "group": group,
        "num_prompt_tokens": 100,
        "num_requested_tokens": len(stamps_s),
        "due_s": due_s,
        "sent_s": due_s,
        "stamps_s": tuple(stamps_s),
        "num_output_tokens": len(stamps_s),
    }
    return Record(**{**facts, **changes})


def failed(group: str, due_s: float, kind: str, **changes: object) -> Record:
    return record(group, due_s, error_kind=kind, error=f"{kind}: no | room", **changes)


def reported(tally: StatsCollector, **changes: object) -> LoadReport:
    """Of a test that ended with its last request."""
    facts: dict[str, object] = {
        "name": "tandem",
        "facts": {"model": "m", "workload": "mix"},
        "wall_s": tally.last_end_s,
        "scopes": tally.scopes(tally.last_end_s),
        "windows": tally.windows(tally.last_end_s),
        "examples": tally.examples,
        "sample": tally.sample(),
    }
    return LoadReport(**{**facts, **changes})


HEAD = StepLogHead(
    worker="w1",
    pool="mixed",
    model="m",
    num_threads=2,
    num_blocks=8,
    layout=KVLayout(16, (KVGroup(1, 1, 8, "float32"),)),
    settings=step_settings(Config()),
)


def step(
    at: float, prefill: int, decodes: int, *, seconds: float = 0.5, target: float = 0.0, **changes: int
) -> LoggedStep:
    facts = {"number": int(at), "num_budget_tokens": 512, "num_preempted": 0, "has_failed": False}
    features = StepFeatures(prefill, decodes, 0, 0)
    record = StepRecord(features=features, predicted_s=0.1, measured_s=seconds, target_s=target, **{**facts, **changes})
    return LoggedStep(at, record)


STEPS = (
    step(1000.0, 100, 0),  # before the test
    step(1001.0, 512, 0, seconds=1.0),
    step(1002.0, 256, 4, target=0.25),
    step(1003.0, 0, 4, seconds=0.125, target=0.25, num_preempted=2),
    step(1003.5, 0, 6, seconds=0.125, has_failed=1),
    step(1006.0, 9, 9),  # after it
)
"""Of a test that begins at 1000.5 and takes 5 s, all but the first and the last."""


def written(directory: Path, *steps: LoggedStep, end: str = "\n") -> Path:
    path = directory / "w1.jsonl"
    path.write_text("\n".join([encode_head(HEAD), *map(encode_step, steps)]) + end)
    return path
