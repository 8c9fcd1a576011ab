"""Parse lines of the Azure LLM inference traces of 2023 and 2024 (Patel et al., ISCA 2024; Stojkovic et al., HPCA
2025): CSV of a time and two token counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tandem.workload.lengths import MAX_TOKENS
from tandem.workload.trace_entry import TraceEntry
from tandem.workload.yaml_field import Field, refused

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


def read_entry(line: Field) -> TraceEntry:
    """Return the entry of a line. Raises TandemError(INVALID_REQUEST).

    Digits below the microsecond are dropped; a time without a zone is UTC. An output of 0 tokens becomes one of 1.
    """
    cells = line.text().split(",")
    if len(cells) != 3:
        raise line.refused(f"must be {HEADER}")
    prompt, output = (_tokens(line, cell) for cell in cells[1:])
    if not 1 <= prompt <= MAX_TOKENS or output > MAX_TOKENS:
        raise line.refused(f"a prompt must be of 1 to {MAX_TOKENS} tokens")
    return TraceEntry(_microseconds(line, cells[0]), prompt, max(1, output))


def _microseconds(line: Field, cell: str) -> int:
    try:
        time = datetime.fromisoformat(cell)
    except ValueError as error:
        raise refused(line.place, f"{cell!r} is no time such as 2023-11-16 18:17:03.9799600") from error
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)


def _tokens(line: Field, cell: str) -> int:
    if not (cell.isascii() and cell.isdecimal() and len(cell) <= 12):
        raise refused(line.place, f"{cell!r:.80} is no number of tokens")
    return int(cell)
