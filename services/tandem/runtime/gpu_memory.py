"""Compute how much GPU memory the KV pool may use, from sizes that the caller measured.

`engine.gpu_memory_utilization` is a fraction of the whole device rather than of its free memory, so that workers that
start on one GPU at the same time each get their share, whatever the others have allocated by then.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.config import EngineConfig
from tandem.runtime.architectures.spec import DecoderSpec
from tandem_kernels.contract import SCRATCH_BYTES

CONTEXT_BYTES = 768 << 20
"""GPU memory of a process outside the allocator: CUDA context, loaded kernels, library handles, captured graphs."""
SLACK = 1.5
"""Factor on the size of live tensors for the allocator's fragmentation."""
_FLOAT64 = 8


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of one GPU and this process's use of it, in bytes, from which the size of the KV pool follows.

    `total`: size of the GPU's memory. `free`: free memory of the GPU now. `used`: memory held by this process's
    tensors, mostly weights. `step`: temporary memory of the largest step."""

    total: int
    free: int
    used: int
    step: int

    def for_pool(self, utilization: float) -> int:
        """Return the bytes left for the KV pool of a process that may use the fraction `utilization` of the GPU.

        Zero or a negative number means that there is no room for a pool."""
        remaining = int(utilization * self.total) - self.used - self.step - CONTEXT_BYTES
        return min(remaining, self.free - self.step)


def step_bytes(config: DecoderSpec, engine: EngineConfig, item_bytes: int) -> int:
    """Estimate the temporary memory of the largest step in bytes: activations, logits and kernel scratch memory.

    `item_bytes`: bytes of one activation. Sampling computes in float64, with up to two copies of the logits."""
    num_rows = max(engine.max_num_batched_tokens, engine.max_num_seqs)
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    row = (4 * config.hidden_size + heads + 3 * config.active_inner) * item_bytes
    logits = engine.max_num_seqs * config.vocab_size * (2 * item_bytes + 2 * _FLOAT64)
    # Graphs keep the scratch memory that was allocated during their capture.
    return int(SLACK * (num_rows * row + logits)) + SCRATCH_BYTES * (1 + engine.cuda_graphs)
