"""Parse Tandem's own format of recorded requests, one line at a time.

A trace consists of JSON lines. The first is the header: {"format": "tandem-requests", "version": 1, "block_size": 64}.
Each other line is a request, in order of due time. It has the keys `due_s` and `num_output_tokens`, and optionally
`group`, `tenant`, `lane` and `priority`. The prompt is given in one of three forms: only its length as
`num_prompt_tokens`; this length and `blocks`, a list with an id for each block of the prompt, of which the last may be
shorter; or `prompt_tokens`, the ids of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.lane import Lane
from tandem.workload.lengths import MAX_TOKENS
from tandem.workload.trace_entry import Prompt, PromptBlocks, TraceEntry
from tandem.workload.yaml_field import Field, refused

FORMAT = "tandem-requests"
VERSION = 1
_ALWAYS = ("due_s", "num_output_tokens")
_PROMPT = ("num_prompt_tokens", "blocks", "prompt_tokens")
_OPTIONAL = ("group", "tenant", "lane", "priority", *_PROMPT)


def reader(header: Field) -> Callable[[Field], TraceEntry]:
    """Check the header of a trace in Tandem's format and return the function that parses a later line into an entry.

    This function and the returned one raise TandemError(INVALID_REQUEST) for a line that they cannot parse. A request
    with 0 output tokens becomes one with 1.
    """
    found = header.record(("format", "version", "block_size"))
    if found["version"].value != VERSION:
        raise found["version"].refused(f"must be {VERSION}")
    block_size = found["block_size"].whole(1, MAX_TOKENS)
    return lambda line: _read_entry(line, block_size)


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
