"""What a worker writes down of its steps, as lines of JSON, and how they are read back; never opens a file.

The first line says whose steps these are (`StepLogHead`), each other line is one step (`StepRecord`, `StepFeatures`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tandem.core.config import Config
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import build
from tandem.core.step_cost import StepFeatures
from tandem.kv.layout import KVLayout
from tandem.sched.state.schedule_result import StepRecord

FORMAT = "tandem-steps-1"
_SECTIONS = ("engine", "speculative", "slo", "handoff")
"""The settings that a step's work depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogHead:
    """`num_threads`: compute threads; 0: not known. `settings` holds the sections of `Config` that shape steps."""

    worker: str
    pool: str
    model: str
    num_threads: int
    num_blocks: int
    layout: KVLayout
    settings: Mapping[str, Mapping[str, Any]]

    @property
    def config(self) -> Config:
        return build([(self.worker, self.settings)])


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """`at`: seconds since the epoch at the step's end."""

    at: float
    record: StepRecord


@dataclass(frozen=True, slots=True)
class StepLog:
    head: StepLogHead
    steps: tuple[LoggedStep, ...]


def shaping(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """The `settings` of a head."""
    return {section: asdict(getattr(config, section)) for section in _SECTIONS}


def encode_head(head: StepLogHead) -> str:
    layout = head.layout.to_dict()
    told = {"worker": head.worker, "pool": head.pool, "model": head.model, "num_threads": head.num_threads}
    return json.dumps(
        {"format": FORMAT, **told, "num_blocks": head.num_blocks, "layout": layout, "settings": head.settings}
    )


def encode_step(step: LoggedStep) -> str:
    record, told = step.record, step.record.features
    fields = {
        "number": record.number,
        "at": round(step.at, 6),
        "prefill_tokens": told.num_prefill_tokens,
        "decode_seqs": told.num_decode_seqs,
        "decode_context": told.decode_context,
        "prefill_pairs": told.num_prefill_pairs,
        "predicted_s": round(record.predicted_s, 7),
        "measured_s": round(record.measured_s, 7),
        "target_s": record.target_s,
        "budget_tokens": record.num_budget_tokens,
        "preempted": record.num_preempted,
        "failed": record.has_failed,
    }
    return json.dumps(fields)


def decode_log(lines: Iterable[str], name: str) -> StepLog:
    """Raises TandemError that says `name` and the line. A last line without an end is left out: its worker was killed
    while it wrote."""
    numbered = enumerate(lines, 1)
    first = next(numbered, None)
    if first is None:
        raise _refuse(name, 1, "is empty")
    head = _read(name, 1, first[1], _head)
    return StepLog(head, tuple(_steps(name, numbered)))


def _steps(name: str, numbered: Iterator[tuple[int, str]]) -> Iterator[LoggedStep]:
    for number, line in numbered:
        if not line.endswith("\n"):
            return
        yield _read(name, number, line, _step)


def _read(name: str, number: int, line: str, decode: Any) -> Any:
    try:
        return decode(json.loads(line))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, TandemError) as error:
        raise _refuse(name, number, f"is no line of a step log: {type(error).__name__} {error}") from error


def _head(told: Mapping[str, Any]) -> StepLogHead:
    if told.get("format") != FORMAT:
        raise ValueError(f"format {told.get('format')!r}, expected {FORMAT!r}")
    head = StepLogHead(
        worker=str(told["worker"]),
        pool=str(told["pool"]),
        model=str(told["model"]),
        num_threads=int(told["num_threads"]),
        num_blocks=int(told["num_blocks"]),
        layout=KVLayout.from_dict(told["layout"]),
        settings=told["settings"],
    )
    if head.num_blocks < 1:
        raise ValueError(f"a pool of {head.num_blocks} blocks")
    _ = head.config  # Raises for what are no settings.
    return head


def _step(told: Mapping[str, Any]) -> LoggedStep:
    counts = [int(told[key]) for key in ("prefill_tokens", "decode_seqs", "decode_context", "prefill_pairs")]
    record = StepRecord(
        number=int(told["number"]),
        features=StepFeatures(*counts),
        predicted_s=float(told["predicted_s"]),
        measured_s=float(told["measured_s"]),
        target_s=float(told["target_s"]),
        num_budget_tokens=int(told["budget_tokens"]),
        num_preempted=int(told["preempted"]),
        has_failed=bool(told["failed"]),
    )
    if not (math.isfinite(record.measured_s) and record.measured_s > 0 and math.isfinite(float(told["at"]))):
        raise ValueError(f"a step took {record.measured_s} s")
    if min(counts) < 0:
        raise ValueError(f"a step of {record.features}")
    return LoggedStep(float(told["at"]), record)


def _refuse(name: str, line: int, what: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"{name}, line {line}: {what}")
