"""One engine for all tests of this folder, its images and a cluster in containers.

The tests run in the engine's network, and check at the end that the machine is as it was."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.compose import Stack, compose_program
from tests.containers.engine import ContainerEngine, NoEngine, container_engine, require_programs
from tests.containers.images import (
    GATEWAY,
    WORKER,
    build,
    build_redis,
    download_packages,
    make_base_image,
    served_packages,
)
from tests.containers.machine_state import machine_state


@pytest.fixture(scope="session")
def engine() -> Iterator[ContainerEngine]:
    """An engine that has the base images and serves packages to builds."""
    before = machine_state()
    # Not pytest's folder, which stays: images and containers take gigabytes.
    with tempfile.TemporaryDirectory(prefix="tandem-containers-") as name:
        folder = Path(name)
        try:
            require_programs()
            compose_program()
            (folder / "packages").mkdir()
            download_packages(folder / "packages")
            with (
                container_engine(folder) as engine,
                engine.network(),
                served_packages(folder / "packages"),
            ):
                make_base_image(engine, folder / "base")
                yield engine
        except NoEngine as reason:
            pytest.skip(f"no container engine: {reason}")
    assert machine_state() == before


@pytest.fixture(scope="session")
def images(engine: ContainerEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the log of the build of each image."""
    logs = {image: build(engine, image) for image in (GATEWAY, WORKER)}
    build_redis(engine, Stack.redis_image(), tmp_path_factory.mktemp("redis"))
    return logs


@pytest.fixture(scope="session")
def stack(engine: ContainerEngine, images: dict[str, str]) -> Iterator[Stack]:
    """The core of deploy/compose.yaml, up and healthy. Tests that break it wait until it is healthy again."""
    stack = Stack(engine)
    try:
        stack.up()
        yield stack
    finally:
        stack.down()
