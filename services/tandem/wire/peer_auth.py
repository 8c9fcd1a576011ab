"""How one program proves to the others of its cluster that it belongs there, and asks them to; never serves a call.

Without a secret and without TLS files everybody is believed, which is for one machine.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio

from tandem.core.clock import wall_ns
from tandem.core.config import ClusterConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import Incarnation
from tandem.wire.auth_interceptor import OTHER_LIFE, AuthInterceptor
from tandem.wire.call_auth import (
    HEADER,
    MAX_SKEW_S,
    NONCE_BYTES,
    CallToken,
    headers_of,
    is_proven,
    parse_token,
    prove,
    sign_token,
)
from tandem.wire.channels import open_channel, server_options
from tandem.wire.gen import worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.secret_file import SecretFile
from tandem.wire.tls import Pems, TlsFiles

REFUSED = f"it does not believe us: its cluster.secret_file differs, or its clock does by more than {MAX_SKEW_S:g} s"
"""What UNAUTHENTICATED means to whoever has signed."""

_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"]


class Signed(NamedTuple):
    metadata: tuple[tuple[str, bytes], ...]
    nonce: bytes


class PeerAuth:
    """`who` names this program to the others. `wall` gives seconds since the epoch, `draw` so many random bytes."""

    def __init__(
        self,
        who: str,
        secret: SecretFile | None = None,
        tls: TlsFiles | None = None,
        wall: Callable[[], float] = lambda: wall_ns() / 1e9,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._who = who
        self._secret = secret
        self._tls = tls
        self._wall = wall
        self._draw = draw

    @classmethod
    def of(cls, who: str, config: ClusterConfig) -> PeerAuth:
        """By settings. Raises TandemError(INVALID_REQUEST) for files that cannot be used."""
        secret = SecretFile(Path(config.secret_file)) if config.secret_file else None
        return cls(who, secret, TlsFiles(config) if config.has_tls else None)

    def __repr__(self) -> str:
        return f"<trust of {self._who}: {self._secret}, {self._tls}>"

    @property
    def is_open(self) -> bool:
        """Everybody is believed."""
        return self._secret is None and self._tls is None

    # ---- as a client

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """A channel to `host:port`. It connects at its first call."""
        return open_channel(address, None if self._tls is None else self._tls.channel_credentials())

    def certificate_signature(self) -> Pems | None:
        """What a channel shows that is opened now. One that was opened with something else is to be opened again when
        it breaks."""
        return None if self._tls is None else self._tls.current()

    def stub(self, channel: grpc.aio.Channel, incarnation: Incarnation) -> WorkerStub:
        """The calls to one life of a worker, signed; its `Describe` raises TandemError(UNAUTHENTICATED) when the
        answer does not prove that the worker knows the secret too."""
        stub = WorkerStub(channel)
        if self._secret is None:
            return stub
        describe = stub.Describe
        for method in _SERVICE.methods:
            setattr(stub, method.name, self._signing(getattr(stub, method.name), _path(method.name), incarnation))
        stub.Describe = self._doubting(describe, incarnation)
        return stub

    def sign(self, method: str, incarnation: Incarnation) -> Signed:
        """The metadata of one call, good once; none without a secret."""
        if self._secret is None:
            return Signed((), b"")
        now, nonce = self._wall(), self._draw(NONCE_BYTES)
        stamp = CallToken(self._who, int(now * 1e3), incarnation, nonce)
        return Signed(((HEADER, sign_token(stamp, method, self._secret.current(now)[0])),), nonce)

    def require_proof(self, nonce: bytes, reply: worker_pb2.DescribeReply) -> None:
        """Raises TandemError(UNAUTHENTICATED) unless who answered knows the secret."""
        assert self._secret is not None
        said, now = _bytes_of(reply), self._wall()
        is_believed = is_proven(reply.transport_proof, nonce, said, self._secret.current(now))
        if not is_believed and self._secret.look():
            is_believed = is_proven(reply.transport_proof, nonce, said, self._secret.current(now))
        if not is_believed:
            # Nothing of what a stranger says goes further than here, into no log either.
            message = "who answers does not prove that it knows the cluster's secret (cluster.secret_file)"
            raise TandemError(ErrorKind.UNAUTHENTICATED, message)

    # ---- as a server

    def server(self, incarnation: Incarnation) -> grpc.aio.Server:
        """One that lets only calls in that are meant for this life of a worker by somebody of the cluster."""
        guards = () if self._secret is None else (AuthInterceptor(incarnation, self._secret, self._wall),)
        return grpc.aio.server(options=server_options(), interceptors=guards)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Take a port. Raises RuntimeError when it cannot be had."""
        if self._tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._tls.server_credentials())

    def sign_reply(self, metadata: Any, reply: worker_pb2.DescribeReply) -> None:
        """Prove to the caller with this metadata that the answer's transport is ours. Nothing without a secret."""
        stamp = parse_token(next(iter(headers_of(metadata)), b""))
        if self._secret is not None and stamp is not None:
            secret = self._secret.current(self._wall())[0]
            reply.transport_proof = prove(stamp.nonce, _bytes_of(reply), secret)

    # ---- inside

    def _signing(self, call: Any, method: str, incarnation: Incarnation) -> Any:
        def signed(*arguments: Any, **options: Any) -> Any:
            return call(*arguments, metadata=self.sign(method, incarnation).metadata, **options)

        return signed

    def _doubting(self, call: Any, incarnation: Incarnation) -> Any:
        async def describe(request: worker_pb2.DescribeRequest, **options: Any) -> worker_pb2.DescribeReply:
            signed = self.sign(_path("Describe"), incarnation)
            reply: worker_pb2.DescribeReply = await call(request, metadata=signed.metadata, **options)
            self.require_proof(signed.nonce, reply)
            return reply

        return describe


def _path(method: str) -> str:
    return f"/{_SERVICE.full_name}/{method}"


def _bytes_of(reply: worker_pb2.DescribeReply) -> bytes:
    """Of who answers and how its KV is read. Equal on both sides also where one knows more fields than the other:
    new ones take rising ids, and unknown ones are kept behind all others."""
    worker = reply.worker.SerializeToString(deterministic=True)
    return len(worker).to_bytes(4, "big") + worker + reply.transport.SerializeToString(deterministic=True)


def means_other_life(error: grpc.aio.AioRpcError) -> bool:
    """A call was meant for a life of a worker that is over, as another one at its address says."""
    return error.code() is grpc.StatusCode.FAILED_PRECONDITION and error.details() == OTHER_LIFE


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Why a call to a worker failed, for people."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return f"unauthenticated: {REFUSED}"
    return f"{error.code().name.lower()}: {error.details()}"
