"""Replay a trace file line by line, without holding the whole file in memory. The first line shows the file's format.

Reads Mooncake's JSON lines, Azure's CSV and Tandem's own format, each also compressed with gzip.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tandem.core.ids import OPEN_TENANT, RequestId, TenantId
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams
from tandem.workload import seeded_random
from tandem.workload.lengths import MAX_TOKENS
from tandem.workload.scheduled_request import MODEL, ScheduledRequest
from tandem.workload.trace_entry import Prompt, PromptBlocks, TraceEntry
from tandem.workload.yaml_field import Field, refused

CLASSES = ((1 << 10, "under 1K"), (8 << 10, "1K to 8K"), (32 << 10, "8K to 32K"))
"""(tokens, name): the group of a request whose trace has no groups, by the length of its prompt; longer prompts are
LONGEST."""
LONGEST = "over 32K"
MOONCAKE_BLOCK_SIZE = 512
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
FORMAT = "tandem-requests"
VERSION = 1
_ALWAYS = ("due_s", "num_output_tokens")
_PROMPT = ("num_prompt_tokens", "blocks", "prompt_tokens")
_OPTIONAL = ("group", "tenant", "lane", "priority", *_PROMPT)
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


def replay(
    path: Path, seed: int, count: int | None = None, speedup: float = 1.0, salt: str = ""
) -> Iterator[ScheduledRequest]:
    """Return an iterator over the requests of a trace file, due at their recorded times divided by `speedup`; the first
    is due at 0 s.

    `count`: number of requests; None: all. `seed`, `salt`: seeds of what the trace does not contain, such as token ids.
    Raises TandemError(INVALID_REQUEST), which names the file or line: at the call for a file that cannot be used, and
    from the iterator for a bad line. See `entries`."""
    return _scheduled(entries(path, count), seed, speedup, salt)


def entries(path: Path, count: int | None = None) -> Iterator[TraceEntry]:
    """Return an iterator over the first `count` entries of a trace file, in file order; over all if `count` is None.

    Raises TandemError(INVALID_REQUEST), which names the file or line:

    - The call raises it if the file cannot be read, has no entry or an unknown format, or holds fewer than `count`
      entries.
    - The iterator raises it at a line that cannot be read, or that is due before the line above it."""
    trace_format = _detect_format(path)
    needed = 1 if count is None else count
    num_held = sum(1 for _ in islice(_lines(path), trace_format.has_header, trace_format.has_header + needed))
    if num_held < needed:
        raise refused(str(path), f"holds {num_held} requests, {needed} are requested")
    return _in_order(_lines(path), trace_format, count)


class _TraceLine(NamedTuple):
    place: str
    text: str


class _TraceFormat(NamedTuple):
    """How a file is read: `read_entry` makes an entry of a line."""

    has_header: bool
    read_entry: Callable[[_TraceLine], TraceEntry]


def _detect_format(path: Path) -> _TraceFormat:
    """Detect the format from the first line."""
    first = next(_lines(path), None)
    if first is None:
        raise refused(str(path), "is empty")
    if first.text == AZURE_HEADER:
        return _TraceFormat(True, _azure_entry)
    if first.text.startswith("{"):
        head = _json(first)
        if head.value.get("format") == FORMAT:
            block_size = _block_size(head)
            return _TraceFormat(True, lambda line: _tandem_entry(line, block_size))
        if head.fields().keys() >= set(MOONCAKE_KEYS[:2]):
            return _TraceFormat(False, _mooncake_entry)
    known = f"Mooncake's JSON lines, {AZURE_HEADER}, {FORMAT}"
    raise refused(str(path), f"is none of the traces that can be read: {known}; mixes are *.yaml")


def _json(line: _TraceLine) -> Field:
    try:
        return Field(line.place, "", json.loads(line.text))
    except (ValueError, RecursionError) as error:
        raise refused(line.place, f"is not JSON: {error}") from error


def _opened(path: Path) -> AbstractContextManager[Iterable[bytes]]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else path.open("rb")


def _lines(path: Path) -> Generator[_TraceLine, None, None]:
    """Yield all lines that are not blank, with their numbers from 1."""
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield _TraceLine(f"{path}:{number}", text)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise refused(f"{path}:{number}", f"cannot be read further: {error}") from error


def _in_order(
    lines: Generator[_TraceLine, None, None], trace_format: _TraceFormat, count: int | None
) -> Iterator[TraceEntry]:
    latest: int | None = None
    # A refused line, or a consumer that stops early, closes the file.
    with closing(lines):
        for line in islice(lines, trace_format.has_header, None if count is None else trace_format.has_header + count):
            entry = trace_format.read_entry(line)
            if latest is not None and entry.due_us < latest:
                late_s = (latest - entry.due_us) / 1e6
                raise refused(line.place, f"is due {late_s} s before the line above it; sort the trace by time")
            latest = entry.due_us
            yield entry


def scheduled_request_of(entry: TraceEntry, number: int, due_s: float, seed: int, salt: str = "") -> ScheduledRequest:
    """Build the request of the trace entry `entry`, due `due_s` seconds after the start.

    `number`: number of the entry in the trace; the request id is made from it. What the entry does not contain, such as
    token ids, is generated from `seed`, `number` and `salt`."""
    request = Request(
        id=RequestId(f"r{number}"),
        model=MODEL,
        prompt_tokens=entry.tokens(seed, number, salt),
        sampling=SamplingParams(
            max_tokens=entry.num_output_tokens, seed=seeded_random.integer(0, 2**32, seed, "sampling", number)
        ),
        tenant=TenantId(entry.tenant or OPEN_TENANT),
        lane=entry.lane,
        priority=entry.priority,
    )
    return ScheduledRequest(request, entry.group or _class_of(len(request.prompt_tokens)), due_s, entry.tenant)


def _scheduled(trace_entries: Iterable[TraceEntry], seed: int, speedup: float, salt: str) -> Iterator[ScheduledRequest]:
    first_us: int | None = None
    for number, entry in enumerate(trace_entries):
        first_us = entry.due_us if first_us is None else first_us
        yield scheduled_request_of(entry, number, (entry.due_us - first_us) / 1e6 / speedup, seed, salt)


def _class_of(num_tokens: int) -> str:
    return next((name for limit, name in CLASSES if num_tokens < limit), LONGEST)


def _block_size(header: Field) -> int:
    """Check the header of a trace in Tandem's format and return the tokens of its blocks. Raises
    TandemError(INVALID_REQUEST)."""
    found = header.record(("format", "version", "block_size"))
    if found["version"].value != VERSION:
        raise found["version"].refused(f"must be {VERSION}")
    return found["block_size"].whole(1, MAX_TOKENS)


def _tandem_entry(line: _TraceLine, block_size: int) -> TraceEntry:
    """Return the entry of a line of Tandem's own format of recorded requests. Raises TandemError(INVALID_REQUEST). An
    output of 0 tokens becomes one of 1.

    A trace consists of JSON lines. The first is the header: {"format": "tandem-requests", "version": 1, "block_size":
    64}. Each other line is a request, in order of due time. It has the keys `due_s` and `num_output_tokens`, and
    optionally `group`, `tenant`, `lane` and `priority`. The prompt is given in one of three forms: only its length as
    `num_prompt_tokens`; this length and `blocks`, a list with an id for each block of the prompt, of which the last may
    be shorter; or `prompt_tokens`, the ids of its tokens.
    """
    fields = _json(line)
    found = fields.record(_ALWAYS, _OPTIONAL)
    return TraceEntry(
        due_us=round(found["due_s"].number() * 1e6),
        prompt=_prompt(fields, found, block_size),
        num_output_tokens=max(1, found["num_output_tokens"].whole(0, MAX_TOKENS)),
        group=found["group"].text() if "group" in found else "",
        tenant=found["tenant"].text() if "tenant" in found else "",
        lane=found["lane"].lane() if "lane" in found else Lane.INTERACTIVE,
        priority=found["priority"].whole(-(2**31), 2**31 - 1) if "priority" in found else 0,
    )


def _prompt(line: Field, found: dict[str, Field], block_size: int) -> Prompt:
    match [key for key in _PROMPT if key in found]:
        case ["prompt_tokens"]:
            tokens = found["prompt_tokens"].wholes(0, 2**31 - 1)
            if not 1 <= len(tokens) <= MAX_TOKENS:
                raise refused(found["prompt_tokens"].place, f"must be 1 to {MAX_TOKENS} tokens, got {len(tokens)}")
            return tokens
        case ["num_prompt_tokens"]:
            return found["num_prompt_tokens"].whole(1, MAX_TOKENS)
        case ["num_prompt_tokens", "blocks"]:
            num_tokens = found["num_prompt_tokens"].whole(1, MAX_TOKENS)
            ids = found["blocks"].wholes(0, 2**64 - 1)
            return found["blocks"].made(lambda: PromptBlocks(num_tokens, ids, block_size))
        case found_keys:
            raise refused(
                line.place, f"a prompt is num_prompt_tokens, with blocks or without, or prompt_tokens, got {found_keys}"
            )


def _mooncake_entry(line: _TraceLine) -> TraceEntry:
    """Return the entry of a line of Mooncake's traces (Qin et al., FAST 2025): JSON with the hash ids of a prompt's
    blocks. Raises TandemError(INVALID_REQUEST). An output of 0 tokens becomes one of 1.

    `timestamp` in milliseconds, `input_length` and `output_length` in tokens, `hash_ids`: one for each 512 tokens; the
    last block may be shorter. An id identifies its block and all before it, renumbered so that it reveals no content.
    """
    found = _json(line).record(MOONCAKE_KEYS)
    blocks = found["hash_ids"].made(
        lambda: PromptBlocks(
            num_tokens=found["input_length"].whole(1, MAX_TOKENS),
            ids=found["hash_ids"].wholes(0, 2**64 - 1),
            size=MOONCAKE_BLOCK_SIZE,
        )
    )
    due_us = round(found["timestamp"].number() * 1000)
    return TraceEntry(due_us, blocks, max(1, found["output_length"].whole(0, MAX_TOKENS)))


def _azure_entry(line: _TraceLine) -> TraceEntry:
    """Return the entry of a line of the Azure LLM inference traces of 2023 and 2024 (Patel et al., ISCA 2024; Stojkovic
    et al., HPCA 2025): CSV of a time and two token counts. Raises TandemError(INVALID_REQUEST).

    Digits below the microsecond are dropped; a time without a zone is UTC. An output of 0 tokens becomes one of 1.
    """
    cells = line.text.split(",")
    if len(cells) != 3:
        raise refused(line.place, f"must be {AZURE_HEADER}, got {line.text!r:.80}")
    prompt, output = (_tokens(line, cell) for cell in cells[1:])
    if not 1 <= prompt <= MAX_TOKENS or output > MAX_TOKENS:
        raise refused(line.place, f"a prompt must be of 1 to {MAX_TOKENS} tokens, got {line.text!r:.80}")
    return TraceEntry(_microseconds(line, cells[0]), prompt, max(1, output))


def _microseconds(line: _TraceLine, cell: str) -> int:
    try:
        time = datetime.fromisoformat(cell)
    except ValueError as error:
        raise refused(line.place, f"{cell!r} is no time such as 2023-11-16 18:17:03.9799600") from error
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)


def _tokens(line: _TraceLine, cell: str) -> int:
    if not (cell.isascii() and cell.isdecimal() and len(cell) <= 12):
        raise refused(line.place, f"{cell!r:.80} is no number of tokens")
    return int(cell)
