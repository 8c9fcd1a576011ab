"""Test that only an address at which nothing listens counts as refusing connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tandem.wire.listener_probe import refuses_connections

PATIENCE_S = 20.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Yield a socket that accepts connections in the kernel only, as that of a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


async def test_a_program_that_accepts_nothing_still_listens(listener: socket.socket) -> None:
    assert not await refuses_connections(address(listener), PATIENCE_S)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_an_address_is_refused_once_nothing_listens_there(listener: socket.socket, host: str) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert await refuses_connections(f"{host}:{port}", PATIENCE_S)


async def test_a_host_that_does_not_answer_in_time_does_not_refuse() -> None:
    assert not await refuses_connections("127.0.0.1:9", 0.0)


@pytest.mark.parametrize("nowhere", ["nowhere.invalid:7070", "no-port", "127.0.0.1:none", ""])
async def test_an_address_that_cannot_be_connected_to_does_not_refuse(nowhere: str) -> None:
    assert not await refuses_connections(nowhere, PATIENCE_S)
