"""Write and parse Tandem's own format of recorded requests, one line at a time.

JSON lines. The first is the header: {"format": "tandem-requests", "version": 1, "block_size": 64}. Each other line is a
request, in order of due time: `due_s`, `num_output_tokens`, optionally `group`, `tenant`, `lane` and `priority`, and
its prompt in one of three forms: `num_prompt_tokens`; that and `blocks`, an id for each block of the prompt, of which
the last may be shorter; or `prompt_tokens`, the ids of its tokens.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tandem.core.lane import Lane
from tandem.workload.lengths import MAX_TOKENS
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.trace_entry import Prompt, PromptBlocks, TraceEntry
from tandem.workload.yaml_field import Field, refused

FORMAT = "tandem-requests"
VERSION = 1
_ID_BITS = 52
"""Bits of an id that every JSON reader represents exactly."""
_ALWAYS = ("due_s", "num_output_tokens")
_PROMPT = ("num_prompt_tokens", "blocks", "prompt_tokens")
_OPTIONAL = ("group", "tenant", "lane", "priority", *_PROMPT)


def entry_of(
    scheduled: ScheduledRequest, num_output_tokens: int, *, block_size: int, key: bytes | None = None
) -> TraceEntry:
    """Return the trace entry of a request that got `num_output_tokens`.

    It holds the prompt, or with a `key` of 16 to 64 bytes only ids of the prompt's blocks. Equal blocks have equal ids
    under one key; once the key is deleted, texts cannot be guessed by comparing ids. Raises ValueError for other keys.
    """
    request = scheduled.request
    prompt: Prompt = request.prompt_tokens
    if key is not None:
        ids = tuple(block_ids(request.prompt_tokens, block_size, key))
        prompt = PromptBlocks(len(request.prompt_tokens), ids, block_size)
    due_us = round(scheduled.due_s * 1e6)
    return TraceEntry(
        due_us, prompt, num_output_tokens, scheduled.group, scheduled.tenant, request.priority, request.lane
    )


def block_ids(tokens: Sequence[int], block_size: int, key: bytes) -> Iterator[int]:
    """Yield an id for each block that covers all blocks before it too, so that equal ids are equal prefixes."""
    if not 16 <= len(key) <= 64:
        raise ValueError(f"a key has 16 to 64 bytes, got {len(key)}")
    words = array("I", tokens)
    previous_digest = b""
    for start in range(0, len(words), block_size):
        block = words[start : start + block_size].tobytes()
        previous_digest = hashlib.blake2b(previous_digest + block, key=key, digest_size=16).digest()
        yield int.from_bytes(previous_digest[:8], "little") >> (64 - _ID_BITS)


def trace_lines(entries: Iterable[TraceEntry], block_size: int) -> Iterator[str]:
    """Yield lines without line ends, the header first. Raises ValueError for an entry whose blocks have another
    size."""
    yield json.dumps({"format": FORMAT, "version": VERSION, "block_size": block_size})
    for entry in entries:
        if isinstance(entry.prompt, PromptBlocks) and entry.prompt.size != block_size:
            raise ValueError(f"blocks of {entry.prompt.size} tokens in a file of blocks of {block_size}")
        yield json.dumps(_record(entry), separators=(",", ":"))


def reader(header: Field) -> Callable[[Field], TraceEntry]:
    """Return the function that parses the lines after this header.

    Both raise TandemError(INVALID_REQUEST). An output of 0 tokens becomes one of 1.
    """
    found = header.record(("format", "version", "block_size"))
    if found["version"].value != VERSION:
        raise found["version"].refused(f"must be {VERSION}")
    block_size = found["block_size"].whole(1, MAX_TOKENS)
    return lambda line: _read_entry(line, block_size)


def _record(entry: TraceEntry) -> dict[str, Any]:
    record: dict[str, Any] = {"due_s": entry.due_us / 1e6}
    lane = entry.lane.label if entry.lane is not Lane.INTERACTIVE else ""
    optional = {"group": entry.group, "tenant": entry.tenant, "lane": lane, "priority": entry.priority}
    record |= {key: value for key, value in optional.items() if value}
    match entry.prompt:
        case int():
            record["num_prompt_tokens"] = entry.prompt
        case PromptBlocks(num_tokens, ids, _):
            record |= {"num_prompt_tokens": num_tokens, "blocks": ids}
        case tuple():
            record["prompt_tokens"] = entry.prompt
    return {**record, "num_output_tokens": entry.num_output_tokens}


def _read_entry(line: Field, block_size: int) -> TraceEntry:
    found = line.record(_ALWAYS, _OPTIONAL)
    return TraceEntry(
        due_us=round(found["due_s"].number() * 1e6),
        prompt=_prompt(line, found, block_size),
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
