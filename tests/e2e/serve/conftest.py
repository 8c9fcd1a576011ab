"""Share one `tandem serve` among tests; after a test that ended it, the next one starts it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.e2e.serve.served import Served


@pytest.fixture(scope="package")
def start_when_needed() -> Iterator[Callable[[], Served]]:
    running: list[Served] = []
    with ExitStack() as stack:

        def served() -> Served:
            if not running or running[-1].process.poll() is not None:
                running.append(stack.enter_context(Served("--port", "0")).wait_ready())
            return running[-1]

        yield served


@pytest.fixture
def served(start_when_needed: Callable[[], Served]) -> Served:
    return start_when_needed()
