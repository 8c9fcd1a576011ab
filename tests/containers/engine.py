"""A container engine of the tests' own, in namespaces that take their networks, mounts and processes with them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("docker", "dockerd", "docker-init", "iptables", "unshare", "setpriv", "slirp4netns", "debootstrap", "ip")
CGROUP = "tandem-containers"
BRIDGE_ADDRESS = "10.214.0.1"
"""Containers, and builds, reach the network of the engine under this address."""
_CLONE_NEWNET = 0x40000000
_START_S = 60.0
_ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""Runs a program that the kernel kills when the tests' own process ends, whatever ends it."""


class NoEngine(Exception):
    """No container engine can run on this machine."""


class ContainerEngine:
    """A Docker daemon whose files are in `folder`.

    `init_pid`: the first process of its namespaces; when that process ends, the kernel ends all others there and drops
    the namespaces' bridges, firewall rules and mounts."""

    init_pid: int

    def __init__(self, folder: Path) -> None:
        self.environment = {**os.environ, "DOCKER_HOST": f"unix://{folder}/docker.sock", "DOCKER_BUILDKIT": "0"}

    def docker(self, *words: str, check: bool = True, timeout_s: float = 120.0) -> str:
        """Run `docker` and return what it printed on its standard output; CalledProcessError has both outputs."""
        return self.run(str(shutil.which("docker")), *words, check=check, timeout_s=timeout_s)

    def run(self, *command: str, check: bool = True, timeout_s: float = 120.0) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    @contextmanager
    def network(self) -> Iterator[None]:
        """Put this thread, and the threads and processes that it starts, into the engine's network: published ports
        are on 127.0.0.1 there."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        other = os.open(f"/proc/{self.init_pid}/ns/net", os.O_RDONLY)
        try:
            _enter_network(other)
            yield
        finally:
            _enter_network(own)
            os.close(own)
            os.close(other)


def _enter_network(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


# Mounts are private to the namespace: over the folders that a daemon uses whatever its options say lie empty ones.
_START = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /etc/docker
mount -t tmpfs tmpfs /etc/docker
ip link set lo up
exec dockerd --data-root "$1/data" --exec-root "$1/exec" --pidfile "$1/dockerd.pid" --host "unix://$1/docker.sock" \\
    --cgroup-parent "/$2" --bip "$3/24" --storage-driver overlay2 >"$1/dockerd.log" 2>&1
"""


@contextmanager
def container_engine(folder: Path) -> Iterator[ContainerEngine]:
    """Yield an engine whose images and containers lie in `folder`, and end it. Raises NoEngine."""
    require_programs()
    before = set(_cgroups())
    arguments = [*_ENDS_WITH_PARENT, "unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    parent = subprocess.Popen(
        [*arguments, "sh", "-c", _START, "dockerd", str(folder), CGROUP, BRIDGE_ADDRESS],
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    outside: subprocess.Popen[bytes] | None = None
    try:
        engine = ContainerEngine(folder)
        _wait_until_answering(engine, parent, folder / "dockerd.log")
        engine.init_pid = _only_child(parent.pid)
        outside = _connect_outside(engine.init_pid)
        yield engine
    finally:
        if parent.poll() is None:
            parent.kill()  # --kill-child takes the namespaces' first process with it
        parent.wait()
        if outside is not None:
            outside.kill()
            outside.wait()
        _remove_cgroups(before)


def require_programs() -> None:
    if os.geteuid() != 0:
        raise NoEngine("it needs root")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        raise NoEngine(f"{', '.join(missing)} not installed: .ci/system containers")


def _wait_until_answering(engine: ContainerEngine, parent: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while not engine.docker("version", "--format", "{{.Server.Version}}", check=False).strip():
        if parent.poll() is not None or time.monotonic() > end:
            last = log.read_text().splitlines()[-3:] if log.exists() else ["unshare is not allowed"]
            raise NoEngine(f"dockerd does not start: {' / '.join(last)}")
        time.sleep(0.2)


def _only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _connect_outside(init_pid: int) -> subprocess.Popen[bytes]:
    """Connect the engine's network to the outside through a process, which needs no rule of this machine's firewall.
    Nothing of this machine can be reached through it."""
    options = ["--configure", "--mtu=65520", "--disable-host-loopback"]
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [*_ENDS_WITH_PARENT, "slirp4netns", *options, f"--ready-fd={write_end}", str(init_pid), "tap0"],
        pass_fds=[write_end],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(write_end)
    try:
        if os.read(read_end, 1) != b"1":
            process.wait()
            raise NoEngine("slirp4netns does not start")
    finally:
        os.close(read_end)
    return process


def _cgroups() -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").glob(f"**/{CGROUP}") if path.is_dir()]


def _remove_cgroups(before: set[Path]) -> None:
    """Remove the control groups of the engine's containers. The kernel empties them when the last process has ended."""
    end = time.monotonic() + 10.0
    for top in set(_cgroups()) - before:
        for group in sorted((path for path in [top, *top.rglob("*")] if path.is_dir()), reverse=True):
            while True:
                try:
                    group.rmdir()
                    break
                except OSError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.1)
