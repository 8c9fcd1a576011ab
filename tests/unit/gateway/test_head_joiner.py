"""Test that a response's head is written with the first part of its body, and nothing else is held back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tandem.gateway.http.head_joiner import HeadJoiner


class Transport:
    """Record each write, and that the connection was closed."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.write(b"(closed)")

    def is_closing(self) -> bool:
        return b"(closed)" in self.writes


class Cycle:
    """Stand in for uvicorn's cycle, which writes to `transport` and announces the head by `response_started`."""

    def __init__(self) -> None:
        self.response_started = False
        self.transport: Any = Transport()


@pytest.fixture
def cycle() -> Cycle:
    cycle = Cycle()
    cycle.transport = HeadJoiner(cycle)  # type: ignore[arg-type]
    return cycle


def connection(cycle: Cycle) -> Transport:
    """Return the transport behind the joiner."""
    found = cycle.transport._transport
    assert isinstance(found, Transport)
    return found


def test_the_head_is_written_with_the_first_part_of_the_body(cycle: Cycle) -> None:
    behind = connection(cycle)
    cycle.transport.write(b"100 ")
    cycle.response_started = True
    cycle.transport.write(b"head ")
    assert behind.writes == [b"100 "]
    cycle.transport.write(b"one ")
    cycle.transport.write(b"two ")
    assert behind.writes == [b"100 ", b"head one ", b"two "]
    assert cycle.transport is behind


@pytest.mark.parametrize("body", [b"", b"body"])
def test_a_body_may_be_empty(cycle: Cycle, body: bytes) -> None:
    behind = connection(cycle)
    cycle.response_started = True
    cycle.transport.write(b"head ")
    cycle.transport.write(body)
    assert behind.writes == [b"head " + body]


@pytest.mark.parametrize("head", [b"", b"head "])
def test_a_response_that_breaks_off_leaves_nothing_unwritten(cycle: Cycle, head: bytes) -> None:
    behind = connection(cycle)
    if head:
        cycle.response_started = True
        cycle.transport.write(head)
    assert not cycle.transport.is_closing()
    cycle.transport.close()
    assert b"".join(behind.writes) == head + b"(closed)"
    assert cycle.transport.is_closing()
