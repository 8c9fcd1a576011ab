"""How much of a GPU's memory the KV pool gets, as arithmetic; never asks the GPU.

The share counts from the whole device, so that workers that start on it at the same time each keep to theirs whatever
the others have taken by then.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config import EngineConfig
from tandem.runtime.model_config import DecoderConfig
from tandem_kernels.contract import SCRATCH_BYTES

CONTEXT_BYTES = 768 << 20
"""Of a process on a GPU that no tensor shows: its context, loaded kernels, handles of libraries and captured graphs."""
SLACK = 1.5
"""What an allocator takes beyond the tensors that are alive at once."""
_FLOAT64 = 8


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes. `used`: by this process's tensors, its weights above all; `step`: what a step needs for a while."""

    total: int
    free: int
    used: int
    step: int

    def for_pool(self, utilization: float) -> int:
        """What is left for the KV pool of a process that may take this share of the device; not positive: nothing."""
        share = int(utilization * self.total) - self.used - self.step - CONTEXT_BYTES
        return min(share, self.free - self.step)


def step_bytes(config: DecoderConfig, engine: EngineConfig, item_bytes: int) -> int:
    """Of the largest step's activations and logits, and what a kernel takes for itself, about. Numbers of activations
    have `item_bytes` bytes; draws compute in float64, with a copy or two of their logits."""
    num_rows = max(engine.max_num_batched_tokens, engine.max_num_seqs)
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    row = (4 * config.hidden_size + heads + 3 * config.intermediate_size) * item_bytes
    logits = engine.max_num_seqs * config.vocab_size * (2 * item_bytes + 2 * _FLOAT64)
    # Graphs keep what was taken while they were captured.
    return int(SLACK * (num_rows * row + logits)) + SCRATCH_BYTES * (1 + engine.cuda_graphs)
