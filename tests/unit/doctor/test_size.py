"""Test the format of sizes."""

from __future__ import annotations

import pytest

from tandem.doctor.size import format_bytes

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0"), (4096, "4KiB"), (8 * MIB, "8MiB"), (8 * MIB + 5, "8MiB"), (GIB, "1GiB"), (3 * GIB // 2, "1.5GiB")],
)
def test_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
