"""How people are told a number of bytes; never reads one."""

from __future__ import annotations

from tandem.core.config import Bytes

_GIB = 1 << 30


def format_bytes(num_bytes: int) -> str:
    """Exact where a unit divides it, else to a tenth of a GiB or a whole MiB."""
    if num_bytes % _GIB and num_bytes > _GIB:
        return f"{num_bytes / _GIB:.1f}GiB"
    return str(Bytes(num_bytes if num_bytes < 1 << 20 else num_bytes >> 20 << 20))
