"""Provide kernels in Triton for CUDA, which Triton's interpreter runs in tests.

The public names are `KERNELS` and the slower `BATCH_INVARIANT`, whose results for a row do not depend on the other
rows. `attention` chooses between `decode_attention` and `prefill_attention`; the other modules hold one kernel or two
each. Read `attention` first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from tandem_kernels import reference
from tandem_kernels.device_codes import to_device_codes
from tandem_kernels.dispatch import Kernels, Weight
from tandem_kernels.reference.coded import CodedMatrix, restore
from tandem_kernels.triton.attention import paged_attention, row_attention
from tandem_kernels.triton.blocks import pack_blocks, unpack_blocks
from tandem_kernels.triton.digest import block_digest
from tandem_kernels.triton.experts import mix_experts
from tandem_kernels.triton.linear import linear, linear_for_rows
from tandem_kernels.triton.norm import add_rms_norm, rms_norm, silu_mul
from tandem_kernels.triton.rope import rope_cache_write
from tandem_kernels.triton.sample import sample


def to_weight(matrix: CodedMatrix, device: torch.device, dtype: torch.dtype) -> Weight:
    """Return a coded matrix as these kernels take it. The exact result is defined in `tandem_kernels.contract`."""
    return restore(matrix, device, dtype) if dtype == torch.float64 else to_device_codes(matrix, device)


KERNELS = Kernels(
    name="triton",
    to_weight=to_weight,
    linear=linear_for_rows,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_mul=silu_mul,
    # Plain torch runs on any device; it is called once per step and does not synchronise with the host.
    rope_tables=reference.rope_tables,
    rope_cache_write=rope_cache_write,
    # Plain torch that does not synchronise with the host, too.
    route=reference.route,
    mix_experts=mix_experts,
    paged_attention=paged_attention,
    pack_blocks=pack_blocks,
    unpack_blocks=unpack_blocks,
    block_digest=block_digest,
    sample=sample,
)

BATCH_INVARIANT = replace(
    KERNELS,
    name="triton, batch-invariant",
    linear=linear,
    mix_experts=partial(mix_experts, is_batch_invariant=True),
    paged_attention=row_attention,
)
"""Kernels that are all batch-invariant as the contract defines it; those shared with `KERNELS` are so already."""
