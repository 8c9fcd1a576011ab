"""Chooses the kernels of a device; never falls back from one to another."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from tandem_kernels import reference
from tandem_kernels.contract import AttentionBatch, HeadNorms, LayerKV, SamplingRows


class KernelsUnavailable(Exception):
    """A device has no kernels here; says what is missing."""


class BlockDigestOp(Protocol):
    """`contract.block_digest`."""

    def __call__(
        self, pool: torch.Tensor, block_ids: torch.Tensor, block_indices: torch.Tensor, *, head_start: int = 0
    ) -> torch.Tensor: ...


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""`contract.linear`."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a decoder and its cache call, each as `tandem_kernels.contract` says. `name` is for people."""

    name: str
    linear: Product
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    rope_tables: Callable[[torch.Tensor, torch.Tensor, float, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    rope_cache_write: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, HeadNorms | None, LayerKV, torch.Tensor], torch.Tensor
    ]
    paged_attention: Callable[[torch.Tensor, LayerKV, AttentionBatch, float], torch.Tensor]
    pack_blocks: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
    unpack_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
    block_digest: BlockDigestOp
    sample: Callable[[torch.Tensor, SamplingRows], torch.Tensor]


REFERENCE = Kernels(
    name="reference",
    linear=F.linear,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    silu_mul=reference.silu_mul,
    rope_tables=reference.rope_tables,
    rope_cache_write=reference.rope_cache_write,
    paged_attention=reference.paged_attention,
    pack_blocks=reference.pack_blocks,
    unpack_blocks=reference.unpack_blocks,
    block_digest=reference.block_digest,
    sample=reference.sample,
)


def kernels_for(device: torch.device, *, batch_invariant: bool = False) -> Kernels:
    """The kernels of tensors on `device`. Raises KernelsUnavailable: on a GPU the reference, or kernels that are
    interpreted, would be slow without a word, and what plain torch multiplies on a CPU depends on the batch."""
    if device.type == "cpu":
        if batch_invariant:
            raise KernelsUnavailable("plain torch has no batch-invariant products")
        return REFERENCE
    if device.type == "cuda":
        kernels = triton_kernels(batch_invariant=batch_invariant)
        if importlib.import_module("tandem_kernels.triton.interpret").INTERPRETED.value:
            raise KernelsUnavailable("TRITON_INTERPRET is set: kernels would be interpreted on the host")
        return kernels
    raise KernelsUnavailable(f"there are no kernels for {device.type}")


def triton_kernels(*, batch_invariant: bool = False) -> Kernels:
    """The Triton kernels; on CPU tensors they run where Triton interprets (TRITON_INTERPRET=1 before its import).

    Raises KernelsUnavailable where Triton is not installed.
    """
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise KernelsUnavailable(f"Triton is not installed ({error}): pip install 'tandem[cuda]'") from None
    module: Any = importlib.import_module("tandem_kernels.triton")
    kernels: Kernels = module.BATCH_INVARIANT if batch_invariant else module.KERNELS
    return kernels
