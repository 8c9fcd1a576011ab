"""Read each peer by the transport that suits the link to it: NIXL over RDMA or within a machine, else TCP."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.engine.transfer_messages import TransportPeer
from tandem.transfer.interface import BlockCopy, PeerError, PostedRead, ReadState, Transport
from tandem.transfer.memory_pool import MemoryPool
from tandem.transfer.network_devices import active_rdma_ports
from tandem.transfer.process_identity import host_identity, machine_identity

if TYPE_CHECKING:
    from tandem.core.ids import Incarnation, WorkerId, WorkerRef


_RDMA_OF_UCX = ("all", "rc", "dc", "ud", "ib", "srd", "gga")
"""First parts of the names that UCX_TLS may have for RDMA transports, up to an underscore, such as `rc` of
`rc_mlx5`."""
_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Describe what one rank offers to its readers.

    `machine`: text that is equal for two ranks that can read each other without a network (`reach_of`); empty if
    unknown. `has_rdma`: whether the rank may use an active RDMA port. `tcp`, `nixl`: metadata by which readers connect
    to its TCP and its NIXL transport. `nixl_backend`: name of NIXL's backend; empty where the rank has no NIXL.
    """

    machine: str
    has_rdma: bool
    tcp: bytes
    nixl: bytes = b""
    nixl_backend: str = ""


def prefers_nixl(ours: Offer, theirs: Offer) -> bool:
    """Return whether a rank that offers `ours` reads a rank that offers `theirs` over NIXL; if not, it reads over TCP.
    It uses NIXL if both ranks have the same NIXL backend, and besides either the same `machine` or both of them
    RDMA."""
    is_near = bool(ours.machine) and ours.machine == theirs.machine
    has_nixl = bool(ours.nixl_backend) and ours.nixl_backend == theirs.nixl_backend
    return has_nixl and (is_near or (ours.has_rdma and theirs.has_rdma))


def reach_of(device: str) -> str:
    """Return a text that is equal for two processes if NIXL can move their memory of `device` (`cpu` or `cuda:N`)
    without a network; it is used as `Offer.machine`. GPU memory needs the same machine, host memory the same PID
    namespace of one machine. Returns "" where the machine is not known."""
    try:
        return host_identity() if device == "cpu" else machine_identity()
    except OSError:
        return ""


def has_rdma(environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether this process sees an active RDMA port and may use it: /dev/infiniband exists, and UCX_TLS and
    UCX_NET_DEVICES in `environ` do not exclude the port. `root`: directory under which `dev` and `sys` are found."""
    tls, devices = environ.get("UCX_TLS", "all"), environ.get("UCX_NET_DEVICES", "all")
    names = {name.partition("_")[0] for name in tls.removeprefix("^").split(",")}
    # As long as rc is left, UCX needs neither dc nor ud.
    is_usable = names.isdisjoint(("all", "ib", "rc")) if tls.startswith("^") else not names.isdisjoint(_RDMA_OF_UCX)
    if not is_usable or not (root / "dev/infiniband").is_dir():
        return False
    return any(_allows(devices, port) for port in active_rdma_ports(root))


def _allows(devices: str, port: str) -> bool:
    """Return whether UCX may use the RDMA port `port`, such as `mlx5_0:1`. `devices`: a list as in UCX_NET_DEVICES of
    names, of ranges such as `mlx5_[0-3]:1`, or `all`; after `^` it names what is excluded."""
    is_named = any(_names(each, port) for each in devices.removeprefix("^").split(","))
    return is_named is not devices.startswith("^")


def _names(device: str, port: str) -> bool:
    if (found := _RANGE.search(device)) is None:
        return device in ("all", port, port.partition(":")[0])
    head, tail = device[: found.start()], device[found.end() :]
    return any(port == f"{head}{number}{tail}" for number in range(int(found[1]), int(found[2]) + 1))


class _SelfTests:
    """Poll the self-tests of all transports as one read. `tests`: those that have not ended."""

    def __init__(self, tests: list[PostedRead]) -> None:
        self._tests = tests
        self._has_failed = False

    def poll(self) -> ReadState:
        while self._tests:
            state = self._tests[0].poll()
            if state is ReadState.PENDING:
                return state
            del self._tests[0]
            self._has_failed |= state is ReadState.FAILED
        return ReadState.FAILED if self._has_failed else ReadState.DONE


class AutoTransport:
    """Read each peer over NIXL or TCP, as `prefers_nixl` decides. `tcp`, `nixl`: the two transports, which must have
    the same pool and agent name; `close` closes both. `nixl` is None where NIXL does not work. `nixl_backend`,
    `machine`, `has_rdma`: what this rank offers, see `Offer`."""

    def __init__(
        self, tcp: Transport, nixl: Transport | None, nixl_backend: str, *, machine: str, has_rdma: bool
    ) -> None:
        self._tcp = tcp
        self._nixl = nixl
        self._all = [tcp] if nixl is None else [tcp, nixl]
        self._ours = Offer(machine, has_rdma, b"", b"", nixl_backend)
        self._chosen: dict[tuple[WorkerId, Incarnation], Transport] = {}

    def __repr__(self) -> str:
        return f"AutoTransport({self._tcp!r}, {self._nixl!r})"

    @property
    def pool(self) -> MemoryPool:
        return self._tcp.pool

    def enter_thread(self) -> None:
        for transport in self._all:
            transport.enter_thread()

    def describe(self, worker: WorkerRef) -> TransportPeer:
        tcp = self._tcp.describe(worker)
        (rank,) = tcp.ranks
        offer = msgspec.structs.replace(self._ours, tcp=rank.metadata)
        if self._nixl is not None:
            offer = msgspec.structs.replace(offer, nixl=self._nixl.describe(worker).ranks[0].metadata)
        return replace(tcp, ranks=(replace(rank, metadata=msgspec.msgpack.encode(offer)),))

    def connect(self, peer: TransportPeer) -> None:
        transport, part = self._choose(peer)
        if peer.life in self._chosen:
            raise PeerError(f"a read of {peer.worker} from before its teardown is still not proven to have ended")
        transport.connect(part)
        self._chosen[peer.life] = transport

    def disconnect(self, peer: TransportPeer) -> bool:
        if peer.life not in self._chosen:
            return True
        if not self._chosen[peer.life].disconnect(peer):
            return False
        del self._chosen[peer.life]
        return True

    def post_read(self, peer: TransportPeer, copies: Sequence[BlockCopy]) -> PostedRead:
        if peer.life not in self._chosen:
            raise PeerError(f"{peer.worker} is not connected")
        return self._chosen[peer.life].post_read(peer, copies)

    def post_self_test(self) -> PostedRead:
        return _SelfTests([transport.post_self_test() for transport in self._all])

    def progress(self) -> None:
        for transport in self._all:
            transport.progress()

    def close(self) -> None:
        try:
            self._tcp.close()
        finally:
            if self._nixl is not None:
                self._nixl.close()

    def _choose(self, peer: TransportPeer) -> tuple[Transport, TransportPeer]:
        """Return the transport that reads `peer`, and the description of `peer` for that transport. Raises PeerError
        where the metadata of `peer` is not an `Offer`."""
        try:
            offers = [msgspec.msgpack.decode(rank.metadata, type=Offer) for rank in peer.ranks]
        except (ValueError, RecursionError) as error:
            raise PeerError(f"{peer.worker} does not offer transports to choose from: {error}") from None
        if self._nixl is not None and all(prefers_nixl(self._ours, theirs) for theirs in offers):
            return self._nixl, _with_metadata(peer, [offer.nixl for offer in offers])
        return self._tcp, _with_metadata(peer, [offer.tcp for offer in offers])


def _with_metadata(peer: TransportPeer, metadata: Sequence[bytes]) -> TransportPeer:
    ranks = [replace(rank, metadata=each) for rank, each in zip(peer.ranks, metadata, strict=True)]
    return replace(peer, ranks=tuple(ranks))
