"""Hosts of this machine: network namespaces with addresses of their own, joined by a bridge, whose links can be cut,
delayed, lossy or slow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_FORBIDDEN = ("not permitted", "ermission denied", "not supported", "Unknown device type", "Read-only file system")
"""What `ip` reports where this user or this kernel has no network namespaces, bridges or pairs of devices."""


class NoNamespaces(Exception):
    """This user may not make network namespaces on this machine."""


def ip(*words: str) -> None:
    """Run `ip`. Raises NoNamespaces where it is missing or may not do this, and RuntimeError for another failure."""
    if shutil.which("ip") is None:
        raise NoNamespaces("there is no program `ip`")
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        failure = f"ip {' '.join(words)}: {done.stderr.strip()}"
        is_forbidden = any(text in failure for text in _FORBIDDEN)
        raise NoNamespaces(failure) if is_forbidden else RuntimeError(failure)


class Network:
    """The network of one host. `address` is its own, which this machine reaches over the bridge; `within` runs a
    command in it. A relay forwards its frames, if it has one; only then `impair` works."""

    def __init__(self, name: str, address: str) -> None:
        self.address = address
        self._name = name
        self._port = f"{name}h"
        self._second = f"{name}i"
        self._relay: subprocess.Popen[str] | None = None
        ip("netns", "add", name)

    def join(self, bridge: str, *, has_relay: bool = False) -> None:
        """Connect this network to the bridge."""
        name, inside = self._name, f"{self._name}n"
        if has_relay:
            self._relay = _start_relay(self._port, inside)
            ip("link", "set", inside, "netns", name)
        else:
            ip("link", "add", self._port, "type", "veth", "peer", "name", inside, "netns", name)
        ip("link", "set", self._port, "master", bridge, "up")
        ip("-n", name, "addr", "add", f"{self.address}/24", "dev", inside)
        for device in ("lo", inside):
            ip("-n", name, "link", "set", device, "up")

    def add_device(self, bridge: str, address: str) -> None:
        """Connect this network to another bridge too, by a device of its own with this address."""
        device = self.devices[1]
        ip("link", "add", self._second, "type", "veth", "peer", "name", device, "netns", self._name)
        ip("link", "set", self._second, "master", bridge, "up")
        ip("-n", self._name, "addr", "add", f"{address}/24", "dev", device)
        ip("-n", self._name, "link", "set", device, "up")

    @property
    def devices(self) -> tuple[str, str]:
        """Return the names of this network's own device and of the one that `add_device` adds."""
        return f"{self._name}n", f"{self._name}m"

    def received_bytes(self, device: str) -> int:
        counter = f"/sys/class/net/{device}/statistics/rx_bytes"
        return int(subprocess.run([*self.within, "cat", counter], capture_output=True, check=True).stdout)

    @property
    def within(self) -> tuple[str, ...]:
        return str(shutil.which("ip")), "netns", "exec", self._name

    def unplug(self) -> None:
        ip("link", "set", self._port, "down")

    def unplug_second(self) -> None:
        ip("link", "set", self._second, "down")

    def plug_in(self) -> None:
        ip("link", "set", self._port, "up")

    def blackhole_route_to(self, other: Network) -> None:
        """Drop everything that this network sends to `other`."""
        ip("-n", self._name, "route", "add", "blackhole", f"{other.address}/32")

    def restore_route_to(self, other: Network) -> None:
        ip("-n", self._name, "route", "del", "blackhole", f"{other.address}/32")

    def impair(self, *, delay_s: float = 0.0, loss: float = 0.0, bytes_per_s: float = float("inf")) -> None:
        """Delay each frame in both directions, lose a fraction `loss`, and limit the rate, until the next call. Without
        arguments the link is as good as new."""
        assert self._relay is not None and self._relay.stdin is not None
        self._relay.stdin.write(f"{delay_s} {loss} {bytes_per_s}\n")
        self._relay.stdin.flush()

    def remove(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        # The pair goes now, not when the last process of the namespace has ended: the next network may have its names.
        for words in (("link", "del", self._port), ("link", "del", self._second), ("netns", "del", self._name)):
            with suppress(NoNamespaces, RuntimeError):
                ip(*words)


def _start_relay(*devices: str) -> subprocess.Popen[str]:
    script = str(Path(__file__).with_name("relay.py"))
    relay = subprocess.Popen(
        [sys.executable, script, *devices],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert relay.stdout is not None
    if relay.stdout.readline() != "ready\n":
        _, complaint = relay.communicate()
        raise NoNamespaces(f"no TAP devices: {complaint.strip().splitlines()[-1:]}")
    return relay


def _add_bridge() -> int:
    """Make a bridge with a number that no other one has, and return the number. Raises NoNamespaces."""
    first = os.getpid()
    for number in (n % 250 for n in range(first, first + 250)):
        try:
            ip("link", "add", f"tdm{number}br", "type", "bridge")
        except RuntimeError as error:
            if "File exists" not in str(error):
                raise
        else:
            return number
    raise RuntimeError("there are bridges of 250 other tests")


@contextmanager
def networks(*names: str, with_relay: str = "", with_two: Sequence[str] = ()) -> Iterator[list[Network]]:
    """Yield a network for each name, of which the one called `with_relay` can be impaired, and those `with_two` have a
    second device on another bridge; remove them at the end. Raises NoNamespaces."""
    number = _add_bridge()
    bridge, prefix = f"tdm{number}br", f"10.213.{number}"
    second = f"tdm{number}b2"
    with ExitStack() as stack:
        for each in (bridge, second):
            stack.callback(subprocess.run, ["ip", "link", "del", each], capture_output=True, check=False)
        ip("addr", "add", f"{prefix}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        if with_two:
            ip("link", "add", second, "type", "bridge")
            ip("link", "set", second, "up")
        made: list[Network] = []
        for index, name in enumerate(names, 2):
            made.append(Network(f"tdm{number}{name}", f"{prefix}.{index}"))
            stack.callback(made[-1].remove)
            made[-1].join(bridge, has_relay=name == with_relay)
            if name in with_two:
                made[-1].add_device(second, f"10.214.{number}.{index}")
        yield made
