"""Parse lines of Mooncake's traces (Qin et al., FAST 2025): JSON with the hash ids of a prompt's blocks.

`timestamp` in milliseconds, `input_length` and `output_length` in tokens, `hash_ids`: one for each 512 tokens; the last
block may be shorter. An id identifies its block and all before it, renumbered so that it reveals no content.
"""

from __future__ import annotations

from tandem.workload.lengths import MAX_TOKENS
from tandem.workload.trace_entry import PromptBlocks, TraceEntry
from tandem.workload.yaml_field import Field

BLOCK_SIZE = 512
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_entry(line: Field) -> TraceEntry:
    """Return the entry of a line. Raises TandemError(INVALID_REQUEST). An output of 0 tokens becomes one of 1."""
    found = line.record(KEYS)
    blocks = found["hash_ids"].made(
        lambda: PromptBlocks(
            num_tokens=found["input_length"].whole(1, MAX_TOKENS),
            ids=found["hash_ids"].wholes(0, 2**64 - 1),
            size=BLOCK_SIZE,
        )
    )
    due_us = round(found["timestamp"].number() * 1000)
    return TraceEntry(due_us, blocks, max(1, found["output_length"].whole(0, MAX_TOKENS)))
