"""Format numbers of bytes for reports."""

from __future__ import annotations

from tandem.core.config import Bytes

_GIB = 1 << 30


def format_bytes(num_bytes: int) -> str:
    """Format a size exactly if a unit divides it, else rounded to 0.1 GiB above 1 GiB, or down to whole MiB below."""
    if num_bytes % _GIB and num_bytes > _GIB:
        return f"{num_bytes / _GIB:.1f}GiB"
    return str(Bytes(num_bytes if num_bytes < 1 << 20 else num_bytes >> 20 << 20))
