"""Read the newest log line of each worker that Ray Serve runs on this machine, to show what a starting worker does."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tandem.worker.serve.pool_spec import PoolSpec

TAIL_BYTES = 16384
"""Bytes at the end of a log file in which the newest line is looked for."""
MAX_MESSAGE = 80
_OWN_NAME = re.compile(r"^\S+@\S+ ")
_TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z]+ \S+ (?P<message>.*)")


def starting_workers(logs: Path, pools: Iterable[str]) -> str:
    """Return a text on what the workers of each pool are doing, such as "prefill: loading the model; decode: 2
    calibrating, 1 importing".

    `logs`: directory of Serve's log files. `pools`: names of the pools. What a worker is doing is taken from the newest
    line of its log."""
    parts = []
    for pool in pools:
        messages = Counter(
            _newest_message(file) for file in sorted(logs.glob(f"replica_*_{PoolSpec(name=pool).deployment}_*.log"))
        )
        if not messages:
            messages["starting a process"] = 1
        is_single = messages.total() == 1
        parts.append(f"{pool}: " + ", ".join(text if is_single else f"{n} {text}" for text, n in messages.items()))
    return "; ".join(parts)


def _newest_message(file: Path) -> str:
    """Return the first clause of the newest line of a worker's log file, in text or JSON, without the worker's name.

    It is cut to `MAX_MESSAGE` characters."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in reversed(lines):
        message = _OWN_NAME.sub("", _message_of(line) or "").partition(";")[0]
        if message:
            return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 3]}..."
    return "starting"


def _message_of(line: str) -> str | None:
    found = _TEXT_LINE.fullmatch(line)
    if found:
        return found["message"]
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return str(record["message"]) if isinstance(record, dict) and "message" in record else None
