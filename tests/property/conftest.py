"""Marks the property tests as soak tests when they are to run for long; never changes what they check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.property.effort import IS_SOAK

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_SOAK:
        return
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.soak)
            item.add_marker(pytest.mark.timeout(0))
