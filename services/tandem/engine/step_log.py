"""Encode and decode a worker's step log, one JSON object per line. Files are opened by the caller.

The first line identifies the worker and its settings (`StepLogHead`); each other line is one step (`StepRecord`,
`StepFeatures`).
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

FORMAT = "tandem-steps-2"
_SECTIONS = ("engine", "speculative", "slo", "lanes", "handoff")
"""Sections of `Config` on which the work of a step depends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogHead:
    """First line of a step log: the worker, its model and the settings that its steps depend on.

    `worker`: worker id and incarnation as text. `pool`: the role with which the worker was started. `model`: name of
    its model. `num_threads`: compute threads; 0 if unknown. `num_blocks`: KV blocks of the worker's pool. `layout`:
    shape and data type of a KV block. `settings`: the sections of `Config` that determine a step's work, see
    `step_settings`.
    """

    worker: str
    pool: str
    model: str
    num_threads: int
    num_blocks: int
    layout: KVLayout
    settings: Mapping[str, Mapping[str, Any]]

    @property
    def config(self) -> Config:
        """Return the configuration that has the logged `settings`, and defaults for all settings that are not logged.
        Raises TandemError for invalid settings."""
        return build([(self.worker, self.settings)])


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """Hold one step of a step log. `at`: when the step ended, in seconds since the epoch. `record`: its prediction and
    measurement."""

    at: float
    record: StepRecord


@dataclass(frozen=True, slots=True)
class StepLog:
    """The decoded log of one worker process: its head, and its steps in the order of their end."""

    head: StepLogHead
    steps: tuple[LoggedStep, ...]


def step_settings(config: Config) -> Mapping[str, Mapping[str, Any]]:
    """Return the sections of `config` that determine a step's work, as mappings, for `StepLogHead.settings`."""
    return {section: asdict(getattr(config, section)) for section in _SECTIONS}


def encode_head(head: StepLogHead) -> str:
    """Return the first line of a step log, without a newline."""
    return json.dumps({"format": FORMAT, **asdict(head), "layout": head.layout.to_dict()})


def encode_step(step: LoggedStep) -> str:
    """Return the line of one step, without a newline."""
    record = step.record
    features = record.features
    fields = {
        "number": record.number,
        "at": round(step.at, 6),
        "prefill_tokens": features.num_prefill_tokens,
        "decode_seqs": features.num_decode_seqs,
        "decode_context": features.decode_context,
        "prefill_pairs": features.num_prefill_pairs,
        "predicted_s": round(record.predicted_s, 7),
        "measured_s": round(record.measured_s, 7),
        "target_s": record.target_s,
        "budget_tokens": record.num_budget_tokens,
        "preempted": record.num_preempted,
        "yielded": record.num_yielded,
        "failed": record.has_failed,
    }
    return json.dumps(fields)


def decode_log(lines: Iterable[str], name: str) -> StepLog:
    """Decode the lines of a step log. `name`: the name of the log in error messages.

    A last line without a newline is skipped, because its worker was killed while writing. Raises TandemError
    (INVALID_REQUEST) with the name and the line number for anything else that cannot be decoded, an empty log included.
    """
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


def _head(fields: Mapping[str, Any]) -> StepLogHead:
    if fields.get("format") != FORMAT:
        raise ValueError(f"format {fields.get('format')!r}, expected {FORMAT!r}")
    head = StepLogHead(
        worker=str(fields["worker"]),
        pool=str(fields["pool"]),
        model=str(fields["model"]),
        num_threads=int(fields["num_threads"]),
        num_blocks=int(fields["num_blocks"]),
        layout=KVLayout.from_dict(fields["layout"]),
        settings=fields["settings"],
    )
    if head.num_blocks < 1:
        raise ValueError(f"a pool of {head.num_blocks} blocks")
    _ = head.config  # Raises for what are no settings.
    return head


def _step(fields: Mapping[str, Any]) -> LoggedStep:
    counts = [int(fields[key]) for key in ("prefill_tokens", "decode_seqs", "decode_context", "prefill_pairs")]
    record = StepRecord(
        number=int(fields["number"]),
        features=StepFeatures(*counts),
        predicted_s=float(fields["predicted_s"]),
        measured_s=float(fields["measured_s"]),
        target_s=float(fields["target_s"]),
        num_budget_tokens=int(fields["budget_tokens"]),
        num_preempted=int(fields["preempted"]),
        num_yielded=int(fields["yielded"]),
        has_failed=bool(fields["failed"]),
    )
    if not (math.isfinite(record.measured_s) and record.measured_s > 0 and math.isfinite(float(fields["at"]))):
        raise ValueError(f"a step took {record.measured_s} s")
    if min(counts) < 0:
        raise ValueError(f"a step of {record.features}")
    return LoggedStep(float(fields["at"]), record)


def _refuse(name: str, line: int, what: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"{name}, line {line}: {what}")
