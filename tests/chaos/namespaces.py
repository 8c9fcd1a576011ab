"""Networks of their own for programs of this machine, joined by a bridge, whose links can really be cut; never more
than `ip` does."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


class NoNamespaces(Exception):
    """This user may not make network namespaces on this machine."""


def ip(*words: str) -> None:
    """Raises NoNamespaces with what `ip` says."""
    if shutil.which("ip") is None:
        raise NoNamespaces("there is no program `ip`")
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Network:
    """A namespace. `address` is its own, which this machine reaches over the bridge; `within` runs a command in it."""

    def __init__(self, name: str, bridge: str, prefix: str, index: int) -> None:
        self.address = f"{prefix}.{index}"
        self._name = name
        self._port = f"{name}h"
        ip("netns", "add", name)
        ip("link", "add", self._port, "type", "veth", "peer", "name", f"{name}n", "netns", name)
        ip("link", "set", self._port, "master", bridge, "up")
        ip("-n", name, "addr", "add", f"{self.address}/24", "dev", f"{name}n")
        for device in ("lo", f"{name}n"):
            ip("-n", name, "link", "set", device, "up")

    @property
    def within(self) -> tuple[str, ...]:
        return str(shutil.which("ip")), "netns", "exec", self._name

    def unplug(self) -> None:
        ip("link", "set", self._port, "down")

    def plug_in(self) -> None:
        ip("link", "set", self._port, "up")

    def blackhole_route_to(self, other: Network) -> None:
        """Drop everything that this network sends to `other`."""
        ip("-n", self._name, "route", "add", "blackhole", f"{other.address}/32")

    def restore_route_to(self, other: Network) -> None:
        ip("-n", self._name, "route", "del", "blackhole", f"{other.address}/32")


@contextmanager
def networks(*names: str) -> Iterator[list[Network]]:
    """Raises NoNamespaces; whatever happens, none is left."""
    number = os.getpid() % 250
    bridge, prefix = f"tdm{number}br", f"10.213.{number}"
    full = [f"tdm{number}{name}" for name in names]
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{prefix}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        yield [Network(name, bridge, prefix, index) for index, name in enumerate(full, 2)]
    finally:
        for words in (*(("netns", "del", name) for name in full), ("link", "del", bridge)):
            subprocess.run(["ip", *words], capture_output=True, check=False)
