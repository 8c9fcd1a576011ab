"""The cluster that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.chaos import world
from tests.e2e.gateway.tiny_model import make_model
from tests.hosts.cluster import Hosts, running_hosts
from tests.hosts.network import NoNamespaces

SETTINGS = (*world.SETTINGS, "--transfer-backend", "tcp")


@pytest.fixture(scope="package")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        try:
            yield stack.enter_context(running_hosts(directory, make_model(directory / "tiny"), *SETTINGS))
        except NoNamespaces as reason:
            pytest.skip(f"no network namespaces here: {reason}")
