"""Test the server around the gRPC services: health, reflection, a port in use and a graceful stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from tandem.admission.api_keys import hash_text, key_digest
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.app import GatewayApp
from tandem.gateway.context.interfaces import AllowAll, Authenticator, ServedModel
from tandem.gateway.grpc.health import HealthService
from tandem.gateway.grpc.server import GrpcServer
from tandem.gateway.telemetry.request_metrics import RequestMetrics
from tandem.gateway.tenants.authenticator import ApiKeyAuthenticator
from tandem.gateway.tenants.tenants_file import parse_tenants
from tandem.gateway.text.text_model import TextModel
from tandem.wire.channels import open_channel
from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub
from tests.unit.gateway.conftest import HELLO, MUCH, NARROW, Endless, Front, ScriptedDispatch, grpc_refusal

pytestmark = pytest.mark.slow

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
INFERENCE = "tandem.v1.Inference"
KEY = "tdm_one"
ONE_KEY = ApiKeyAuthenticator(
    parse_tenants(f"tenants: {{one: {{keys: [{{hash: '{hash_text(key_digest(KEY))}'}}]}}}}", "f"), lambda: 0
)


@asynccontextmanager
async def serving(
    make_text: Callable[..., TextModel], **limits: Any
) -> AsyncIterator[tuple[GrpcServer, ScriptedDispatch, Any]]:
    """Run a separate server on the test's loop; yield it, its dispatch, and a channel to it."""
    dispatch = ScriptedDispatch([ServedModel(name="tiny", max_model_len=512, text=make_text(), created=1)])
    server = make_server(dispatch, **limits)
    await server.start("127.0.0.1", 0)
    try:
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, dispatch, channel
    finally:
        await server.stop(0.0)


def make_server(dispatch: ScriptedDispatch, *, authenticator: Authenticator | None = None, **limits: Any) -> GrpcServer:
    door = authenticator or AllowAll()
    return GrpcServer(dispatch, GatewayApp(dispatch, door, GatewayConfig()).answers, door, **limits)


def check(channel: grpc.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int(health_pb2_grpc.HealthStub(channel).Check(request).status)


@pytest.mark.parametrize("service", ["", INFERENCE])
def test_health_follows_readiness(front: Front, channel: grpc.Channel, service: str) -> None:
    assert check(channel, service) == SERVING
    front.dispatch.missing = "no live worker"
    assert check(channel, service) == NOT_SERVING
    assert check(channel, "live") == SERVING


def test_the_health_of_an_unknown_service_is_not_found(front: Front, channel: grpc.Channel) -> None:
    error = grpc_refusal(check, channel, "tandem.v1.Nothing")
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_a_health_watch_reports_changes(front: Front, channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
    assert next(watch).status == SERVING
    front.dispatch.missing = "no live worker"
    assert next(watch).status == NOT_SERVING
    front.dispatch.missing = None
    assert next(watch).status == SERVING
    watch.cancel()
    unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
    assert next(unknown).status == UNKNOWN
    unknown.cancel()


def test_reflection_is_enough_to_call_without_our_code(front: Front, channel: grpc.Channel) -> None:
    front.answer("Paris")
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {INFERENCE, "grpc.health.v1.Health"} <= set(database.get_services())
    service = DescriptorPool(database).FindServiceByName(INFERENCE)
    methods = {method.name: method for method in service.methods}
    assert methods["StreamChat"].server_streaming and not methods["Chat"].server_streaming
    request_class, answer = [
        GetMessageClass(kind) for kind in (methods["Chat"].input_type, methods["Chat"].output_type)
    ]
    call = channel.unary_unary(
        f"/{INFERENCE}/Chat",
        request_serializer=request_class.SerializeToString,
        response_deserializer=answer.FromString,
    )
    reply: Any = call(request_class(model="tiny", messages=[{"role": "user", "content": "Hello"}]))
    assert reply.choices[0].message.content == "Paris" and reply.usage.total_tokens > 0


@pytest.mark.parametrize(("key", "refused"), [(None, "no_key"), ("tdm_wrong", "wrong_key"), (KEY, None)])
async def test_reflection_needs_a_key_and_health_does_not(
    make_text: Callable[..., TextModel], key: str | None, refused: str | None
) -> None:
    async with serving(make_text, authenticator=ONE_KEY) as (_, _, channel):
        metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        stub = ServerReflectionStub(channel)
        if refused is None:
            call = stub.ServerReflectionInfo(iter([ServerReflectionRequest(list_services="")]), metadata=metadata)
            (reply,) = [reply async for reply in call]
            assert INFERENCE in {service.name for service in reply.list_services_response.service}
        else:
            # It sends nothing: gRPC's asyncio client ends with INTERNAL where a send fails because the server has ended
            # the call, and the server's status is not read yet.
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.ServerReflectionInfo(metadata=metadata).read()
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
            trailers = dict(error.value.trailing_metadata())
            assert pb.ErrorDetail.FromString(trailers["tandem-error-bin"]).reason == refused
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == SERVING


async def test_a_taken_port_is_refused_by_name(make_text: Callable[..., TextModel]) -> None:
    async with serving(make_text) as (server, dispatch, _):
        second = make_server(dispatch)
        with pytest.raises(TandemError) as refusal:
            await second.start("127.0.0.1", server.port)
        assert refusal.value.kind is ErrorKind.INVALID_REQUEST and refusal.value.param == "gateway.grpc_port"
        await second.stop(0.0)


async def test_the_server_listens_on_an_ipv6_address(make_text: Callable[..., TextModel]) -> None:
    server = make_server(ScriptedDispatch([]))
    try:
        await server.start("::1", 0)
    except TandemError:
        pytest.skip("no IPv6 here")
    async with open_channel(f"[::1]:{server.port}") as channel:
        assert list((await InferenceStub(channel).ListModels(pb.ListModelsRequest())).data) == []
    await server.stop(0.0)


async def test_a_watch_that_is_sending_when_the_server_stops_still_sends_the_last_status() -> None:
    class Context:
        def __init__(self) -> None:
            self.sent: list[int] = []

        async def write(self, update: Any) -> None:
            self.sent.append(update.status)
            service.close()

    service, context = HealthService(ScriptedDispatch([]), ()), Context()
    async with asyncio.timeout(10):
        await service.Watch(health_pb2.HealthCheckRequest(), context)
    assert context.sent == [SERVING, NOT_SERVING]


async def test_a_stop_lets_streams_end_and_takes_no_new_call(
    make_text: Callable[..., TextModel], running_front: Front
) -> None:
    async with serving(make_text) as (server, dispatch, channel):
        gate = asyncio.Event()
        stream = running_front.stream("Par", gate, "is", running_front.finished())
        dispatch.script = lambda request: stream
        stub = InferenceStub(channel)
        call = stub.StreamChat(HELLO)
        updates = aiter(call)
        received = [await anext(updates)]
        watch = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert (await anext(watch)).status == SERVING
        stopping = asyncio.create_task(server.stop(20.0))
        # A watch would go on for ever; it ends with the status that became true.
        assert [update.status async for update in watch] == [NOT_SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Chat(HELLO)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        gate.set()
        received += [update async for update in updates]
        assert "".join(choice.message.content for update in received for choice in update.choices) == "Paris"
        assert await call.code() is grpc.StatusCode.OK
        await stopping
    assert stream.num_closes == 1 and len(dispatch.requests) == 1


async def test_a_stop_cuts_what_takes_too_long(make_text: Callable[..., TextModel], running_front: Front) -> None:
    async with serving(make_text) as (server, dispatch, channel):
        stream = running_front.stream("Par", asyncio.Event())
        dispatch.script = lambda request: stream
        updates = aiter(InferenceStub(channel).StreamChat(HELLO))
        await anext(updates)
        await server.stop(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            while True:
                await anext(updates)
        assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(stream.closed.wait, 20) and stream.num_closes == 1


async def test_a_client_that_takes_nothing_is_cut_off_and_its_request_cancelled(
    make_text: Callable[..., TextModel],
) -> None:
    async with serving(make_text, stalled_client_s=0.3) as (server, dispatch, _):
        stream = Endless()
        dispatch.script = lambda request: stream
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=NARROW) as channel:
            call = InferenceStub(channel).StreamChat(MUCH)
            assert (await call.read()).id
            assert await asyncio.to_thread(stream.closed.wait, 20) and stream.num_closes == 1
            # What was sent before is still there to be read, and then how it ended.
            with pytest.raises(grpc.aio.AioRpcError) as cut:
                while await call.read() is not grpc.aio.EOF:
                    pass
                await call
            assert cut.value.code() is grpc.StatusCode.CANCELLED
            detail = pb.ErrorDetail.FromString(dict(cut.value.trailing_metadata())["tandem-error-bin"])
            assert (detail.kind, detail.reason) == ("cancelled", "stalled_client")


async def test_beyond_the_call_limit_earlier_calls_go_on_and_probes_are_answered(
    make_text: Callable[..., TextModel], running_front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[RequestMetrics] = []
    monkeypatch.setattr(RequestMetrics, "crowded", lambda measures: counted.append(measures))
    async with serving(make_text, max_calls=2) as (_, dispatch, channel):
        gate = asyncio.Event()
        streams = [running_front.stream("Par", gate, "is", running_front.finished()) for _ in range(2)]
        opening = iter(streams)
        dispatch.script = lambda request: next(opening)
        stub = InferenceStub(channel)
        calls = [stub.StreamChat(HELLO) for _ in streams]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Chat(HELLO)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        trailers = dict(refusal.value.trailing_metadata())
        assert trailers["retry-after"] == "1" and trailers["x-tandem-reject-reason"] == "connections"
        assert len(counted) == 1
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == SERVING
        gate.set()
        for call in calls:
            while await call.read() is not grpc.aio.EOF:
                pass
            assert await call.code() is grpc.StatusCode.OK
        dispatch.script = lambda request: running_front.answer("Paris")
        assert (await stub.Chat(HELLO)).choices[0].message.content == "Paris"
