"""Plain torch kernels: what `tandem_kernels.contract` means, and the CPU path; never compiled."""

from tandem_kernels.reference.attention import paged_attention
from tandem_kernels.reference.cache import cache_write
from tandem_kernels.reference.digest import block_digest
from tandem_kernels.reference.norm import rms_norm
from tandem_kernels.reference.rope import rope, rope_tables

__all__ = ["block_digest", "cache_write", "paged_attention", "rms_norm", "rope", "rope_tables"]
