"""Test how real workers tell members from strangers: by a secret, by certificates, and by neither."""

from __future__ import annotations

import base64
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tandem.core.config import ClusterConfig, Config, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished
from tandem.core.ids import Incarnation, WorkerRef
from tandem.wire.call_auth import HEADER, MAX_SKEW_S
from tandem.wire.channels import open_channel
from tandem.wire.gen import kv_pb2, worker_pb2
from tandem.wire.gen.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server
from tandem.wire.peer_auth import OTHER_LIFE, PeerAuth
from tandem.wire.secret_file import SecretFile
from tandem.worker.addresses import require_worker_auth
from tests.certificates import Authority
from tests.e2e.client import Client, hand_over, new_request, resume_from
from tests.unit.worker.conftest import SECRET, Node, Nodes, pace

OTHER = "o" * 64
OUTSIDE = WorkerConfig(host="0.0.0.0")


@pytest.fixture
async def node(nodes: Nodes, secret: Path) -> Node:
    return await nodes.start(cluster=ClusterConfig(secret_file=str(secret)))


def write(path: Path, *secrets: str) -> Path:
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{line}\n" for line in secrets))
    return fresh.replace(path)


def trust_in(path: Path, **options: Any) -> PeerAuth:
    return PeerAuth("test", SecretFile(path), **options)


METHODS: dict[str, tuple[str, Any]] = {
    "Submit": ("unary_unary", worker_pb2.SubmitRequest()),
    "Cancel": ("unary_unary", worker_pb2.CancelRequest()),
    "OfferMigration": ("unary_unary", worker_pb2.OfferMigrationRequest()),
    "Release": ("unary_unary", worker_pb2.ReleaseRequest()),
    "Describe": ("unary_unary", worker_pb2.DescribeRequest(with_bundle=True)),
    "Drain": ("unary_unary", worker_pb2.DrainRequest()),
    "UndoDrain": ("unary_unary", worker_pb2.UndoDrainRequest()),
    "ProbeLink": ("unary_unary", worker_pb2.ProbeLinkRequest()),
    "Watch": ("unary_stream", worker_pb2.WatchRequest(gateway="g")),
    "StreamHandoff": ("stream_stream", kv_pb2.StreamHandoffRequest()),
}


async def refusal(
    channel: grpc.aio.Channel, method: str, metadata: Any = (), message: bytes | None = None
) -> tuple[grpc.StatusCode, str]:
    """Make a call that the worker does not trust; return how it ends, and fail the test when anything comes back.

    gRPC's client ends a stream by itself, with INTERNAL, when its own write fails before it has read the worker's
    refusal: such a call says nothing of the worker and is made again.
    """
    kind, request = METHODS.get(method, ("unary_unary", worker_pb2.DrainRequest()))
    call = getattr(channel, kind)(f"/tandem.v1.Worker/{method}")
    body = request.SerializeToString() if message is None else message
    for _ in range(100):
        argument = _once(body) if kind == "stream_stream" else body
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            answer = call(argument, metadata=metadata, timeout=20)
            if kind == "unary_unary":
                await answer
            else:
                raise AssertionError([update async for update in answer])
        error = caught.value
        assert [key for key, _ in error.initial_metadata()] == []
        if kind != "stream_stream" or error.code() is not grpc.StatusCode.INTERNAL:
            return error.code(), str(error.details())
    raise AssertionError("no call got as far as the worker's refusal")


async def _once(message: bytes) -> AsyncIterator[bytes]:
    yield message


def test_every_method_is_tried() -> None:
    assert METHODS.keys() == {method.name for method in worker_pb2.DESCRIPTOR.services_by_name["Worker"].methods}


@pytest.mark.parametrize("method", [*METHODS, "NoSuchMethod"])
async def test_a_strangers_calls_are_refused_without_details(node: Node, tmp_path: Path, method: str) -> None:
    pace(node.executor)
    key = await node.client.generate(new_request("fake", [1, 2, 3], 900))
    await node.client.num_tokens(key, 1)
    wrong = trust_in(write(tmp_path / "wrong", OTHER)).sign(f"/tandem.v1.Worker/{method}", node.worker.me.incarnation)
    async with open_channel(node.worker.me.address) as channel:
        for metadata in ((), wrong.metadata, ((HEADER, b"\x00\xff" * 60),)):
            assert await refusal(channel, method, metadata) == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")
    # Of the same stream: effects of the calls would have arrived before the second of these.
    await node.client.num_tokens(key, len(node.client.tokens(key)) + 2)
    assert not node.client.ends(key), "it was cancelled"
    assert not node.client.load.draining


async def test_a_call_is_good_for_its_method_its_moment_and_its_life(node: Node, secret: Path) -> None:
    me, path = node.worker.me, "/tandem.v1.Worker/Drain"
    unauthenticated = (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")
    trust = trust_in(secret)
    cancel = trust.sign("/tandem.v1.Worker/Cancel", me.incarnation).metadata
    early = trust_in(secret, wall=lambda: 1.7e9 + MAX_SKEW_S).sign(path, me.incarnation).metadata
    async with open_channel(me.address) as channel:
        assert await refusal(channel, "Drain", cancel) == unauthenticated
        assert await refusal(channel, "Drain", early) == unauthenticated
        other = trust.sign(path, Incarnation(me.incarnation - 1)).metadata
        assert await refusal(channel, "Drain", other) == (grpc.StatusCode.FAILED_PRECONDITION, OTHER_LIFE)
        await WorkerStub(channel).Cancel(worker_pb2.CancelRequest(), metadata=cancel, timeout=20)
        for _ in range(2):
            assert await refusal(channel, "Cancel", cancel) == unauthenticated, "a replay"


async def test_one_of_many_simultaneous_copies_is_accepted(node: Node, secret: Path) -> None:
    signed = trust_in(secret).sign("/tandem.v1.Worker/Cancel", node.worker.me.incarnation)
    async with open_channel(node.worker.me.address) as channel:
        stub = WorkerStub(channel)
        calls = [stub.Cancel(worker_pb2.CancelRequest(), metadata=signed.metadata, timeout=20) for _ in range(30)]
        codes = [await call.code() for call in calls]
    assert sorted(codes, key=str) == [grpc.StatusCode.OK] + [grpc.StatusCode.UNAUTHENTICATED] * 29


async def test_large_metadata_and_bodies_are_refused_before_they_are_read(node: Node) -> None:
    """The body would be 32 MiB. Metadata beyond 8 KiB is refused by gRPC itself."""
    async with open_channel(node.worker.me.address) as channel:
        code, _ = await refusal(channel, "Submit", ((HEADER, bytes(5000)),), bytes(32 << 20))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        code, _ = await refusal(channel, "Submit", ((HEADER, bytes(40_000)),))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        many = tuple((HEADER, bytes(100)) for _ in range(30))
        assert (await refusal(channel, "Submit", many))[0] is grpc.StatusCode.UNAUTHENTICATED
        text = ((HEADER.removesuffix("-bin"), base64.b64encode(bytes(97)).decode()),)
        assert (await refusal(channel, "Submit", text))[0] is grpc.StatusCode.UNAUTHENTICATED
    assert (await node.client.books()).num_sequences == 0


async def test_a_strangers_silent_stream_is_refused_too(node: Node) -> None:
    """The stream is refused without waiting for a first message."""
    async with open_channel(node.worker.me.address) as channel:
        call = WorkerStub(channel).StreamHandoff()  # type: ignore[call-arg]
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_refusals_are_logged_once(
    node: Node, secret: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = trust_in(write(tmp_path / "wrong", OTHER))
    async with open_channel(node.worker.me.address) as channel:
        for _ in range(20):
            await refusal(channel, "Submit")
            await refusal(channel, "Drain", wrong.sign("/tandem.v1.Worker/Drain", node.worker.me.incarnation).metadata)
    lines = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    assert len(lines) == 2 and "127.0.0.1" in lines[0]
    assert "no signature" in lines[0] and "another secret" in lines[1]


async def test_a_rotation_loses_nothing(node: Node, secret: Path) -> None:
    """The worker's file and the gateway's change one after the other, as mounted Secrets do, while jobs come and go."""
    pace(node.executor, 0.002)
    mine = write(secret.with_name("mine"), SECRET)
    for worker_s, gateway_s in [
        ((SECRET, OTHER), (SECRET,)),
        ((SECRET, OTHER), (SECRET, OTHER)),
        ((OTHER, SECRET), (SECRET, OTHER)),
        ((OTHER, SECRET), (OTHER, SECRET)),
        ((OTHER, SECRET), (OTHER,)),
        ((OTHER,), (OTHER,)),
    ]:
        write(secret, *worker_s)
        write(mine, *gateway_s)
        async with Client(node.worker.me, f"g-{worker_s}-{gateway_s}", trust_in(mine)) as client:
            keys = [await client.generate(new_request("fake", [1, 2, n], 5)) for n in range(3)]
            for key in keys:
                assert isinstance(await client.end_of(key), Finished)
            await client.books()


async def test_members_hand_over_and_a_consumer_with_another_secret_does_not(
    nodes: Nodes, secret: Path, tmp_path: Path
) -> None:
    cluster = ClusterConfig(secret_file=str(secret))
    producer, consumer = await nodes.start(cluster=cluster), await nodes.start(cluster=cluster)
    key, _ = await hand_over(producer.client, consumer.client, new_request("fake", list(range(12)), 6))
    assert isinstance(await consumer.client.end_of(key), Finished)
    pulled = consumer.client.pulled(key)
    assert pulled is not None and pulled.num_blocks > 0
    stranger = await nodes.start(cluster=ClusterConfig(secret_file=str(write(tmp_path / "other", OTHER))))
    key, _ = await hand_over(producer.client, stranger.client, new_request("fake", list(range(12)), 6))
    await stranger.client.failure(key, ErrorKind.KV_LOST)


class Impostor(WorkerServicer):
    """Pose as a worker that has ended. The impostor knows all that the worker once reported, and any proof it gave."""

    def __init__(self, description: worker_pb2.DescribeReply) -> None:
        self.description = description
        self.seen: list[str] = []

    async def Describe(self, request: Any, context: Any) -> worker_pb2.DescribeReply:
        self.seen.append("Describe")
        return self.description

    async def StreamHandoff(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.seen.append("StreamHandoff")

    async def Watch(self, request: Any, context: Any) -> None:  # type: ignore[override]
        self.seen.append("Watch")


async def test_a_stranger_at_a_worker_s_address_cannot_pose_as_a_source(nodes: Nodes, secret: Path) -> None:
    cluster = ClusterConfig(secret_file=str(secret))
    consumer, gone = await nodes.start(cluster=cluster), await nodes.start(cluster=cluster)
    description = await gone.client.stub.Describe(worker_pb2.DescribeRequest(), timeout=20)
    assert len(description.transport_proof) == 32
    impostor = Impostor(description)
    server = grpc.aio.server()
    add_WorkerServicer_to_server(impostor, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        posed = WorkerRef(gone.worker.me.id, gone.worker.me.incarnation, address)
        for proof in (description.transport_proof, b""):
            description.transport_proof = proof
            with pytest.raises(TandemError, match="does not prove"):
                await _describe(posed, trust_in(secret))
        impostor.seen.clear()
        key = await resume_from(posed, consumer.client, new_request("fake", list(range(12)), 6))
        await consumer.client.failure(key, ErrorKind.KV_LOST)
        assert set(impostor.seen) == {"Describe"}, "it was followed"
        await consumer.client.settled()
    finally:
        await server.stop(None)


async def test_a_proof_holds_where_one_side_knows_more_fields(node: Node, secret: Path) -> None:
    trust = trust_in(secret)
    signed = trust.sign("/tandem.v1.Worker/Describe", node.worker.me.incarnation)
    reply = node.worker._descriptor.describe(with_bundle=False, metadata=signed.metadata)
    newer = bytes([99 << 3 & 0x7F | 0x82, 99 >> 4, 3]) + b"new"  # field 99, three bytes
    reply.transport.MergeFromString(newer)
    trust.sign_reply(signed.metadata, reply)
    with pytest.raises(TandemError):
        trust.require_proof(b"x" * 16, reply)
    received = worker_pb2.DescribeReply.FromString(reply.SerializeToString())
    assert newer in received.transport.SerializeToString()
    trust.require_proof(signed.nonce, received)


# ---- certificates


async def test_with_certificates_only_their_holders_get_in(nodes: Nodes, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    node = await nodes.start(cluster=authority.issue("worker"))
    request = new_request("fake", [1, 2, 3], 4)
    assert isinstance(await node.client.end_of(await node.client.generate(request)), Finished)
    # A client's certificate may have any name.
    await _describe(node.worker.me, PeerAuth.of("x", authority.issue("gateway", dns="a.gateway")))
    for stranger in (PeerAuth("plain"), PeerAuth.of("x", Authority(tmp_path / "theirs").issue("stranger"))):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _describe(node.worker.me, stranger)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    no_certificate = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    async with open_channel(node.worker.me.address, no_certificate) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=5)


async def test_a_worker_whose_certificate_has_another_name_is_not_believed(nodes: Nodes, tmp_path: Path) -> None:
    node = await nodes.start(cluster=Authority(tmp_path / "ours").issue("worker", dns="elsewhere"))
    assert isinstance(node.client.stream_error, grpc.aio.AioRpcError)
    assert node.client.stream_error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_new_certificate_is_shown_to_the_next_connection(nodes: Nodes, tmp_path: Path) -> None:
    """The old CA is replaced too: open connections continue, and new ones need the new CA."""
    ours, next_one = Authority(tmp_path / "ours"), Authority(tmp_path / "next")
    cluster = ours.issue("worker")
    node = await nodes.start(cluster=cluster)
    trust = PeerAuth.of("x", cluster)
    await _describe(node.worker.me, trust)
    before = trust.certificate_signature()
    fresh = next_one.issue("worker")
    for name in ("tls_key_file", "tls_cert_file", "tls_ca_file"):
        shutil.copyfile(getattr(fresh, name), getattr(cluster, name))
    assert trust.certificate_signature() != before
    await _describe(node.worker.me, trust)
    await _describe(node.worker.me, PeerAuth.of("x", fresh))
    await node.client.books()
    shutil.copyfile(__file__, cluster.tls_cert_file)  # no certificate
    await _describe(node.worker.me, PeerAuth.of("x", fresh))
    await _describe(node.worker.me, trust)


async def test_a_secret_and_certificates_go_together(nodes: Nodes, secret: Path, tmp_path: Path) -> None:
    cluster = replace(Authority(tmp_path / "ours").issue("worker"), secret_file=str(secret))
    producer, consumer = await nodes.start(cluster=cluster), await nodes.start(cluster=cluster)
    key, _ = await hand_over(producer.client, consumer.client, new_request("fake", list(range(12)), 6))
    assert isinstance(await consumer.client.end_of(key), Finished)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _describe(producer.worker.me, PeerAuth.of("x", replace(cluster, secret_file="")))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def _describe(worker: WorkerRef, trust: PeerAuth) -> worker_pb2.DescribeReply:
    async with trust.open_channel(worker.address) as channel:
        return await trust.stub(channel, worker.incarnation).Describe(worker_pb2.DescribeRequest(), timeout=20)


# ---- who may listen where


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "worker-0.local"])
def test_a_worker_reachable_from_outside_requires_a_secret(host: str, secret: Path) -> None:
    worker = WorkerConfig(host=host)
    with pytest.raises(TandemError, match=r"--secret-file.*--cluster-insecure") as caught:
        require_worker_auth(Config(worker=worker))
    assert caught.value.kind is ErrorKind.INVALID_REQUEST and caught.value.param == "cluster.secret_file"
    assert require_worker_auth(Config(worker=worker, cluster=ClusterConfig(insecure=True))).is_open
    assert not require_worker_auth(Config(worker=worker, cluster=ClusterConfig(secret_file=str(secret)))).is_open


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_a_worker_on_loopback_requires_no_secret(host: str) -> None:
    assert require_worker_auth(Config(worker=WorkerConfig(host=host))).is_open


def test_certificates_replace_a_secret(tmp_path: Path) -> None:
    cluster = Authority(tmp_path / "ours").issue("worker")
    assert not require_worker_auth(Config(worker=OUTSIDE, cluster=cluster)).is_open


@pytest.mark.parametrize("name", ["tls_cert_file", "tls_key_file", "tls_ca_file"])
@pytest.mark.parametrize("content", [None, "", "nothing"])
def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: str | None) -> None:
    """The file is left out, empty, or has other content."""
    cluster = Authority(tmp_path / "ours").issue("worker")
    if content is None:
        cluster = replace(cluster, **{name: ""})
    else:
        Path(getattr(cluster, name)).write_text(content)
    with pytest.raises(TandemError, match="tls_") as caught:
        PeerAuth.of("x", cluster)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert caught.value.param in (f"cluster.{name}", "cluster.tls_cert_file")


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    mixed = replace(authority.issue("a"), tls_key_file=authority.issue("b").tls_key_file)
    with pytest.raises(TandemError, match="KEY_VALUES_MISMATCH"):
        PeerAuth.of("x", mixed)
