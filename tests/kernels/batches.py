"""Makes the batches that kernels of attention take; tests nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from tandem_kernels.contract import AttentionBatch

_CPU = torch.device("cpu")


def attention_batch(
    spans: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]] | torch.Tensor,
    num_decodes: int = 0,
    device: torch.device = _CPU,
) -> AttentionBatch:
    """Return a batch of a sequence for each (rows, context), whose blocks are a row of `tables`."""
    rows = [num_rows for num_rows, _ in spans]
    starts, contexts, blocks = (
        torch.as_tensor(numbers, dtype=torch.int32, device=device)
        for numbers in (list(accumulate(rows, initial=0)), [context for _, context in spans], tables)
    )
    # The table of a batch of no sequences has a column all the same.
    return AttentionBatch(starts, contexts, blocks if spans else blocks.view(0, 1), num_decodes, max(rows, default=0))
