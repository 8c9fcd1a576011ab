"""Reference kernels in plain torch: they define the results of `tandem_kernels.contract` and serve as a CPU path.

The kernels themselves are imported from here; `coded` and `linear_int8` hold the quantised products of the compiled
decoder, `philox` the random numbers of sampling. Read `attention` and `cache` first.
"""

from tandem_kernels.reference.attention import paged_attention
from tandem_kernels.reference.blocks import block_digest, pack_blocks, unpack_blocks
from tandem_kernels.reference.cache import cache_write
from tandem_kernels.reference.experts import mix_experts, route
from tandem_kernels.reference.norm import add_rms_norm, rms_norm, silu_mul
from tandem_kernels.reference.rope import rope, rope_cache_write, rope_tables
from tandem_kernels.reference.sample import sample

__all__ = [
    "add_rms_norm",
    "block_digest",
    "cache_write",
    "mix_experts",
    "pack_blocks",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_cache_write",
    "rope_tables",
    "route",
    "sample",
    "silu_mul",
    "unpack_blocks",
]
