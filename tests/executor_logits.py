"""Compute the logits of one slice on an executor's model and cache."""

from __future__ import annotations

import torch

from tandem.runtime.base_executor import BaseExecutor
from tandem.runtime.input_batch import build_batch
from tandem.runtime.slice_work import partly_filled
from tandem.sched.state.step_plan import ScheduledSlice


@torch.inference_mode()
def executor_logits(executor: BaseExecutor, piece: ScheduledSlice) -> torch.Tensor:
    """Compute one slice on the CPU and return the logits of all its rows, `[num_tokens, vocab]`."""
    assert executor._limits.check(piece, piece.tokens) is None
    block_size = executor.layout.block_size
    executor.cache.clear(partly_filled(piece, block_size))
    hidden = executor.model.forward(build_batch([piece], [piece.tokens], block_size), executor.cache)
    return executor.model.logits(hidden).clone()
