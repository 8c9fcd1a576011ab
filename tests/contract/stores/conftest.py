"""The kinds of Redis under which every store must do the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tandem.stores.embedded_redis import EmbeddedServer
from tests.contract.stores.redis_servers import NO_FAILOVER, ClusterServers, NoServer, cluster_servers, tcp_server

_numbers = itertools.count()
KINDS = ("embedded", "plain", "cluster")


def started(*options: str) -> Iterator[ClusterServers]:
    """For a fixture; skips where there can be no cluster."""
    try:
        with cluster_servers(*options) as servers:
            yield servers
    except NoServer as error:
        pytest.skip(f"the server found here makes no cluster: {error}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterServers]:
    yield from started(*NO_FAILOVER)


@pytest.fixture(scope="module", params=KINDS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "embedded":
        with EmbeddedServer.start() as embedded:
            yield embedded.url
    elif request.param == "plain":
        with tcp_server() as plain:
            yield plain.url
    else:
        yield request.getfixturevalue("cluster").url


@pytest.fixture
def namespace() -> str:
    return f"n{next(_numbers)}"
