"""Choose the kernels of a device; if they are missing, an error is raised instead of a fallback to other kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from tandem_kernels import reference
from tandem_kernels.contract import AttentionBatch, ExpertRouting, HeadNorms, LayerKV, SamplingRows
from tandem_kernels.device_codes import DeviceCodes
from tandem_kernels.reference.coded import CodedMatrix, restore


class KernelsUnavailable(Exception):
    """Raised when a device has no usable kernels; the message names what is missing."""


class BlockDigestOp(Protocol):
    """Type of the kernel `block_digest`, defined in `tandem_kernels.contract`."""

    def __call__(
        self, pool: torch.Tensor, block_ids: torch.Tensor, block_indices: torch.Tensor, *, head_start: int = 0
    ) -> torch.Tensor: ...


Weight = torch.Tensor | DeviceCodes
"""Weight that `linear` and `mix_experts` take: floats, or what `to_weight` of the same kernels returned."""
Product = Callable[[torch.Tensor, Weight, torch.Tensor | None], torch.Tensor]
"""Type of `linear` in `tandem_kernels.contract`."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of all kernels that a decoder and its cache call. Each field is a kernel, defined in
    `tandem_kernels.contract`; `name` is for logs and reports."""

    name: str
    to_weight: Callable[[CodedMatrix, torch.device, torch.dtype], Weight]
    linear: Product
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    rope_tables: Callable[[torch.Tensor, torch.Tensor, float, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    rope_cache_write: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, HeadNorms | None, LayerKV, torch.Tensor], torch.Tensor
    ]
    route: Callable[[torch.Tensor, torch.Tensor | None, ExpertRouting], tuple[torch.Tensor, torch.Tensor]]
    mix_experts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Weight, Weight], torch.Tensor]
    paged_attention: Callable[[torch.Tensor, LayerKV, AttentionBatch, float], torch.Tensor]
    pack_blocks: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
    unpack_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]
    block_digest: BlockDigestOp
    sample: Callable[[torch.Tensor, SamplingRows], torch.Tensor]


def _linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return F.linear(x, weight, bias)


REFERENCE = Kernels(
    name="reference",
    to_weight=restore,
    linear=_linear,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    silu_mul=reference.silu_mul,
    rope_tables=reference.rope_tables,
    rope_cache_write=reference.rope_cache_write,
    route=reference.route,
    mix_experts=partial(reference.mix_experts, linear=F.linear, silu_mul=reference.silu_mul),
    paged_attention=reference.paged_attention,
    pack_blocks=reference.pack_blocks,
    unpack_blocks=reference.unpack_blocks,
    block_digest=reference.block_digest,
    sample=reference.sample,
)


def kernels_for(device: torch.device, *, batch_invariant: bool = False) -> Kernels:
    """Return the kernels for tensors on `device`: the reference on a CPU, Triton's on a GPU.

    Raises KernelsUnavailable when batch-invariant kernels are requested on a CPU, because plain torch's products depend
    on the batch, and on a GPU where Triton is missing or would interpret the kernels, which would be silently slow."""
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
    """Return the Triton kernels. They run on CPU tensors only if TRITON_INTERPRET=1 was set before Triton's import.

    Raises KernelsUnavailable when Triton is not installed.
    """
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise KernelsUnavailable(f"Triton is not installed ({error}): pip install 'tandem[cuda]'") from None
    module: Any = importlib.import_module("tandem_kernels.triton")
    kernels: Kernels = module.BATCH_INVARIANT if batch_invariant else module.KERNELS
    return kernels
