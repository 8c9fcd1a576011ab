"""Compute the logits of one slice on an executor's model and cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from tandem.runtime.executor import BaseExecutor
from tandem.runtime.input_batch import Batch, build_batch
from tandem.runtime.slice_work import partly_filled
from tandem.sched.state.step_plan import ScheduledSlice


@torch.inference_mode()
def executor_logits(executor: BaseExecutor, piece: ScheduledSlice) -> torch.Tensor:
    """Compute one slice on the executor's device and return the logits of all its rows, `[num_tokens, vocab]`, in host
    memory."""
    assert executor.why_refused(piece, piece.tokens) is None
    block_size = executor.layout.block_size
    executor.cache.clear(partly_filled(piece, block_size))
    batch = _moved(build_batch([piece], [piece.tokens], block_size), executor.cache.pool.device)
    return executor.model.logits(executor.model.forward(batch, executor.cache)).to("cpu", copy=True)


def _moved(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on a device."""
    attention = batch.attention
    return replace(
        batch,
        tokens=batch.tokens.to(device),
        positions=batch.positions.to(device),
        slots=batch.slots.to(device),
        attention=replace(
            attention,
            query_starts=attention.query_starts.to(device),
            context_lens=attention.context_lens.to(device),
            block_tables=attention.block_tables.to(device),
        ),
    )
