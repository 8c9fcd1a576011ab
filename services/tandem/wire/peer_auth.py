"""Authenticate the gRPC calls between one program and the others of its cluster, as a client and as a server.

Without a secret and TLS files every call is accepted, which is meant for a single machine.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from tandem.core.clock import wall_ns
from tandem.core.config import ClusterConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import Incarnation
from tandem.wire.call_auth import (
    HEADER,
    MAX_SKEW_S,
    NONCE_BYTES,
    AuthFailure,
    CallCheck,
    CallToken,
    headers_of,
    is_proven,
    parse_token,
    prove,
    sign_token,
)
from tandem.wire.channels import SERVER_OPTIONS, open_channel
from tandem.wire.gen import worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerStub
from tandem.wire.secret_file import SecretFile
from tandem.wire.tls import Pems, TlsFiles

REFUSED = f"it rejects our signature: its cluster.secret_file differs, or its clock does by more than {MAX_SKEW_S:g} s"
"""Explanation of UNAUTHENTICATED for the sender of a signed call."""
LOG_S = 60.0
"""Minimum seconds between two log lines about calls that are refused for the same reason."""
OTHER_LIFE = "this is another life of the worker"
"""gRPC error details of a call that is meant for another incarnation of the worker; peers compare this text."""

_log = logging.getLogger(__name__)
_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"]


class Signed(NamedTuple):
    """Hold the signature of one call. `metadata`: gRPC metadata to send with the call. `nonce`: nonce of the call,
    which the proof in the reply to `Describe` must cover."""

    metadata: tuple[tuple[str, bytes], ...]
    nonce: bytes


class PeerAuth:
    """Authenticate the calls between this program and the others of its cluster, as a client and as a server.

    Makes channels, stubs that sign calls, and servers. `secret`: the cluster's shared secret; if it is None, calls are
    not signed. `tls`: the TLS files; if it is None, calls are not encrypted. `who`: name of this program in the logs of
    other programs. `wall`: returns seconds since the epoch.
    """

    def __init__(
        self,
        who: str,
        secret: SecretFile | None = None,
        tls: TlsFiles | None = None,
        wall: Callable[[], float] = lambda: wall_ns() / 1e9,
    ) -> None:
        self._who = who
        self._secret = secret
        self._tls = tls
        self._wall = wall

    @classmethod
    def of(cls, who: str, config: ClusterConfig) -> PeerAuth:
        """Read the secret and TLS files that `config` names, and return the PeerAuth of the program `who`.

        Raises TandemError(INVALID_REQUEST) where a file cannot be used.
        """
        secret = SecretFile(Path(config.secret_file)) if config.secret_file else None
        return cls(who, secret, TlsFiles.of_cluster(config) if config.has_tls else None)

    @property
    def is_open(self) -> bool:
        """Return whether calls are not authenticated at all, because there is neither a secret nor TLS."""
        return self._secret is None and self._tls is None

    # ---- as a client

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """Open a gRPC channel to `address`, host:port, with TLS where configured; it connects at the first call."""
        return open_channel(address, None if self._tls is None else self._tls.channel_credentials())

    def certificate_signature(self) -> Pems | None:
        """Return the content of the TLS files, with which a channel that is opened now would connect; None without TLS.

        An open channel keeps the certificate with which it was opened. A caller compares this value with an earlier one
        to see whether a new channel is needed.
        """
        return None if self._tls is None else self._tls.current()

    def stub(self, channel: grpc.aio.Channel, incarnation: Incarnation) -> WorkerStub:
        """Return a stub for `channel` that signs each call for one incarnation of a worker.

        The stub's `Describe` raises TandemError(UNAUTHENTICATED) where the reply does not prove that the worker knows
        the secret. Without a secret the stub neither signs calls nor checks replies.
        """
        stub = WorkerStub(channel)
        if self._secret is None:
            return stub
        describe = stub.Describe
        for method in _SERVICE.methods:
            setattr(stub, method.name, self._signing(getattr(stub, method.name), _path(method.name), incarnation))
        stub.Describe = self._verifying(describe, incarnation)
        return stub

    def sign(self, method: str, incarnation: Incarnation) -> Signed:
        """Sign one call of `method` (`/package.Service/Method`) to an incarnation of a worker, and return the metadata
        to send with it.

        Use the result for one call only: a second call with it would be refused as a replay. Without a secret the
        metadata is empty.
        """
        if self._secret is None:
            return Signed((), b"")
        now, nonce = self._wall(), secrets.token_bytes(NONCE_BYTES)
        token = CallToken(self._who, int(now * 1e3), incarnation, nonce)
        return Signed(((HEADER, sign_token(token, method, self._secret.current(now)[0])),), nonce)

    def require_proof(self, nonce: bytes, reply: worker_pb2.DescribeReply) -> None:
        """Raise TandemError(UNAUTHENTICATED) unless `reply` proves that its sender knows the cluster's secret.

        `nonce`: nonce of the call that `reply` answers. A secret must be configured.
        """
        assert self._secret is not None
        covered, now = _bytes_of(reply), self._wall()
        is_valid = is_proven(reply.transport_proof, nonce, covered, self._secret.current(now))
        if not is_valid and self._secret.look():
            is_valid = is_proven(reply.transport_proof, nonce, covered, self._secret.current(now))
        if not is_valid:
            # Do not quote the reply: content from an unauthenticated peer must not reach a log.
            message = "the program at this address does not prove that it knows the secret: compare cluster.secret_file"
            raise TandemError(ErrorKind.UNAUTHENTICATED, message)

    # ---- as a server

    def server(self, incarnation: Incarnation) -> grpc.aio.Server:
        """Make a gRPC server for one incarnation of a worker; it accepts only calls that are signed for that
        incarnation. Without a secret it accepts every call.
        """
        guards = () if self._secret is None else (AuthInterceptor(incarnation, self._secret, self._wall),)
        return grpc.aio.server(options=SERVER_OPTIONS, interceptors=guards)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Bind a server to `address`, host:port, with TLS where it is configured, and return the port number. Raises
        RuntimeError where the address cannot be bound.
        """
        if self._tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._tls.server_credentials())

    def sign_reply(self, metadata: Any, reply: worker_pb2.DescribeReply) -> None:
        """Add to `reply`, a reply of `Describe`, the proof that this worker knows the cluster's secret.

        `metadata`: gRPC metadata of the call. Does nothing without a secret, or where the call has no valid signature
        header.
        """
        token = parse_token(next(iter(headers_of(metadata)), b""))
        if self._secret is not None and token is not None:
            secret = self._secret.current(self._wall())[0]
            reply.transport_proof = prove(token.nonce, _bytes_of(reply), secret)

    # ---- inside

    def _signing(self, call: Any, method: str, incarnation: Incarnation) -> Any:
        def signed(*arguments: Any, **options: Any) -> Any:
            return call(*arguments, metadata=self.sign(method, incarnation).metadata, **options)

        return signed

    def _verifying(self, call: Any, incarnation: Incarnation) -> Any:
        async def describe(request: worker_pb2.DescribeRequest, **options: Any) -> worker_pb2.DescribeReply:
            signed = self.sign(_path("Describe"), incarnation)
            reply: worker_pb2.DescribeReply = await call(request, metadata=signed.metadata, **options)
            self.require_proof(signed.nonce, reply)
            return reply

        return describe


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # which it takes in the stubs only
    """Check the signature of each gRPC call to one incarnation of a worker, and abort calls that fail the check.

    A call signed with the cluster's `secret` but meant for another incarnation gets FAILED_PRECONDITION with the
    details `OTHER_LIFE`, from which the sender learns of a restart; every other refused call gets UNAUTHENTICATED.
    Refusals are logged. `wall` returns seconds since the epoch. Used on the event loop.
    """

    def __init__(self, incarnation: Incarnation, secret: SecretFile, wall: Callable[[], float]) -> None:
        self._check = CallCheck(incarnation)
        self._secret = secret
        self._wall = wall
        # Failure -> (time of its last log line, calls refused for it since without a line).
        self._logged: dict[AuthFailure, tuple[float, int]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a call if the call's signature is valid. Otherwise return a handler that aborts the
        call before any of its messages is read."""
        call, now = handler_call_details, self._wall()
        headers = headers_of(call.invocation_metadata)
        fault = self._check.judge(headers, call.method, self._secret.current(now), now)
        if fault is AuthFailure.WRONG and self._secret.look():
            fault = self._check.judge(headers, call.method, self._secret.current(now), now)
        if fault is None:
            return await continuation(call)
        return self._refusal(fault)

    def _refusal(self, fault: AuthFailure) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that aborts the call.

        The handler is a streaming one for every method: gRPC would read the message of a unary call before the abort.
        """

        async def refuse(_requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
            self._log_refusal(fault, context.peer())
            if fault is AuthFailure.OTHER_LIFE:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, OTHER_LIFE)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _log_refusal(self, fault: AuthFailure, peer: str) -> None:
        """Log the first call that is refused for a reason, then at most one line per `LOG_S` for that reason."""
        now = self._wall()
        last, num_unlogged = self._logged.get(fault, (None, 0))
        if last is not None and 0 <= now - last < LOG_S:
            self._logged[fault] = (last, num_unlogged + 1)
            return
        self._logged[fault] = (now, 0)
        more = f" ({num_unlogged} further calls since the last such line)" if num_unlogged else ""
        _log.warning("a call from %s is refused: %s%s", peer, fault.value, more)


def _path(method: str) -> str:
    return f"/{_SERVICE.full_name}/{method}"


def _bytes_of(reply: worker_pb2.DescribeReply) -> bytes:
    """Return the bytes that the proof covers: the worker's identity and its KV transport.

    They are equal on both sides even if one side knows more fields than the other, because new fields take rising ids
    and unknown fields are serialized after all others.
    """
    worker = reply.worker.SerializeToString(deterministic=True)
    return len(worker).to_bytes(4, "big") + worker + reply.transport.SerializeToString(deterministic=True)


def means_other_life(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a call failed because another incarnation of the worker now runs at its address."""
    return error.code() is grpc.StatusCode.FAILED_PRECONDITION and error.details() == OTHER_LIFE


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Return why a call to a worker failed, as text for operators: the status and its details."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return f"unauthenticated: {REFUSED}"
    return f"{error.code().name.lower()}: {error.details()}"
