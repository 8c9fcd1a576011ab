"""Test the edges of a gRPC call: metadata both ways, deadlines, cancels, slow readers and errors."""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import LaneYield, Pauses
from tandem.core.lane import Lane
from tandem.core.request_stages import Stage, Wait, WaitCause
from tandem.gateway.grpc.call import DETAIL_TYPE
from tandem.gateway.grpc.service import MAX_HELD
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.wire.channels import CHANNEL_OPTIONS
from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub
from tests.unit.gateway.conftest import HELLO, MUCH, NARROW, Endless, Front, ScriptedStream, grpc_refusal

PATIENCE_S = 20.0
METHODS = ["Chat", "StreamChat"]


def consume(stub: Any, method: str, **options: Any) -> Any:
    """The call, complete; raises grpc.RpcError."""
    if method == "Chat":
        return stub.Chat.with_call(HELLO, **options)[1]
    call = stub.StreamChat(HELLO, **options)
    for _ in call:
        pass
    return call


@pytest.mark.parametrize("method", METHODS)
def test_metadata_in_both_directions(front: Front, stub: Any, method: str) -> None:
    front.answer("Hi", path="fallback;reason=größer")
    call = consume(stub, method, metadata=(("x-request-id", "mine-1"), ("x-request-id", "second")))
    metadata = dict(call.initial_metadata())
    assert metadata["x-request-id"] == "mine-1" and metadata["x-tandem-path"] == "fallback;reason=gr????er"
    assert front.dispatch.callers[-1].request_id == "mine-1"


def test_the_last_message_reports_preemptions(front: Front, stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PhaseLedger, "pauses", Pauses(2, 1.5))
    front.answer("Hi")
    reply = stub.Complete(pb.CompleteRequest(model="tiny", prompt=[pb.Prompt(text="x")]))
    assert (reply.preemptions, reply.paused_ms) == (2, 1500)


def test_the_last_message_explains_its_waits_on_request(
    front: Front, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = (Wait(Stage.PREFILL_QUEUE, WaitCause.PROMPTS_AHEAD, 0.5, 4096),)
    monkeypatch.setattr(PhaseLedger, "waits", waits)
    monkeypatch.setattr(PhaseLedger, "yields", (LaneYield(Lane.BATCH, 1, 812, 51),))
    for metadata in ((("x-tandem-explain", "1"),), ()):
        front.answer("Hi")
        prompts = [pb.Prompt(text=text) for text in "xy"]
        reply = stub.Complete(pb.CompleteRequest(model="tiny", prompt=prompts), metadata=metadata)
        if not metadata:
            assert not reply.waits and not reply.yielded
            continue
        facts = {"stage": "prefill_queue", "cause": "prompts_ahead", "ms": 500.0, "tokens_ahead": 4096}
        assert [*reply.waits] == [pb.Wait(prompt=prompt, **facts) for prompt in (0, 1)]
        assert [*reply.yielded] == [pb.YieldedSequences(lane="batch", sequences=2, tokens=1624, blocks=102)]


@pytest.mark.parametrize("method", METHODS)
def test_placement_reasons_are_sent_on_request(front: Front, stub: Any, method: str) -> None:
    for metadata, expected in (
        ((("x-tandem-explain", "1"),), '[{"prefill": "p1", "decode": "d1"}]'),
        ((("x-tandem-session", "s1"),), None),
    ):
        front.answer("Hi")
        initial_metadata = dict(consume(stub, method, metadata=metadata).initial_metadata())
        assert initial_metadata.get("x-tandem-reasons") == expected
    assert front.dispatch.callers[-1].session == "s1"


def test_the_reasons_of_many_prompts_fit_their_metadata(
    front: Front, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 8 KiB of metadata a client refuses the whole reply."""
    reasons = {"prefill": "p1", "decode": "d1", "cost_ms": {f"part {number}": 123.456 for number in range(25)}}
    monkeypatch.setattr(ScriptedStream, "reasons", reasons)
    front.instant("Hi")
    request = pb.CompleteRequest(model="tiny", prompt=[pb.Prompt(text="x")] * 64)
    reply, call = stub.Complete.with_call(request, metadata=(("x-tandem-explain", "1"),))
    given = json.loads(dict(call.initial_metadata())["x-tandem-reasons"])
    assert len(reply.choices) == 64 and 5 < len(given) < 64 and given == [reasons] * len(given)
    assert sum(32 + len(name) + len(value) for name, value in call.initial_metadata()) < 8192


@pytest.mark.parametrize("label", ["", "with blank", "x" * 129])
def test_a_label_that_headers_cannot_carry_is_replaced(front: Front, stub: Any, label: str) -> None:
    front.answer("Hi")
    initial_metadata = dict(consume(stub, "Chat", metadata=(("x-request-id", label),)).initial_metadata())
    assert len(initial_metadata["x-request-id"]) == 32 and initial_metadata["x-request-id"] != label


def test_a_deadline_reaches_the_dispatch(front: Front, stub: Any) -> None:
    front.answer("Hi")
    consume(stub, "Chat", timeout=1000.0)
    consume(stub, "Chat")
    with_one, without = front.dispatch.callers
    assert with_one.timeout_s is not None and 0 < with_one.timeout_s < 2000.0
    assert without.timeout_s is None


@pytest.mark.parametrize(("method", "begun"), [("Chat", False), ("StreamChat", False), ("StreamChat", True)])
def test_past_its_deadline_a_request_is_cancelled_once(front: Front, stub: Any, method: str, *, begun: bool) -> None:
    stream = front.stream(*(["Par"] if begun else []), asyncio.Event())
    error = grpc_refusal(consume, stub, method, timeout=0.3)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert stream.closed.wait(PATIENCE_S) and stream.num_closes == 1


def test_a_deadline_in_the_queue_takes_the_request_out_of_it(front: Front, stub: Any) -> None:
    front.dispatch.hold_open = True
    error = grpc_refusal(consume, stub, "Chat", timeout=0.3)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert front.dispatch.open_cancelled.wait(PATIENCE_S)


@pytest.mark.parametrize("method", METHODS)
def test_a_client_that_leaves_cancels_its_request_once(front: Front, stub: Any, method: str) -> None:
    stream = front.stream("Par", asyncio.Event())
    call = stub.Chat.future(HELLO) if method == "Chat" else stub.StreamChat(HELLO)
    front.dispatch.opening.get(timeout=PATIENCE_S)
    if method == "StreamChat":
        assert next(call).choices[0].message.content == "Pa"
    call.cancel()
    assert stream.closed.wait(PATIENCE_S) and stream.num_closes == 1


def test_a_client_that_leaves_the_queue_is_taken_out_of_it(front: Front, stub: Any) -> None:
    front.dispatch.hold_open = True
    call = stub.StreamChat(HELLO)
    front.dispatch.opening.get(timeout=PATIENCE_S)
    call.cancel()
    assert front.dispatch.open_cancelled.wait(PATIENCE_S)


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_up_its_stream_alone(front: Front, stub: Any) -> None:
    """The tokens stop once the buffers between the two are full; they would go on for ever otherwise. A client's
    window is 4 MiB by default, which takes many tokens to fill.
    """
    stream = Endless()
    front.dispatch.script = lambda request: stream
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}", options=NARROW) as channel:
        slow: Any = InferenceStub(channel)  # type: ignore[arg-type]
        call = slow.StreamChat(MUCH)
        assert next(call).id
        stream.wait_until_blocked()
        front.answer("Hi")
        consume(stub, "StreamChat")
        call.cancel()
    assert stream.closed.wait(PATIENCE_S) and stream.num_closes == 1


def test_many_connections_at_once(front: Front) -> None:
    front.answer("Hello there")

    def chat(number: int) -> str:
        address = f"127.0.0.1:{front.grpc_port}"
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = InferenceStub(channel)  # type: ignore[arg-type]
            return "".join(update.choices[0].message.content for update in stub.StreamChat(HELLO))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(chat, range(24))) == ["Hello there"] * 24
    assert len(front.dispatch.requests) == 24


# ---- errors


@pytest.mark.parametrize("kind", list(ErrorKind), ids=lambda kind: kind.value)
def test_every_error_has_its_code_and_details(front: Front, stub: Any, kind: ErrorKind) -> None:
    front.stream(TandemError(kind, "größer", param="n", retry_after_s=1.25, reason="queue_full"))
    error = grpc_refusal(consume, stub, "Chat")
    trailers = dict(error.trailing_metadata())
    assert error.code().name == kind.grpc
    assert error.details() == "größer"
    detail = pb.ErrorDetail.FromString(trailers["tandem-error-bin"])
    assert (detail.kind, detail.param, detail.retry_after_s) == (kind.value, "n", 1.25)
    assert (detail.reason, detail.type) == ("queue_full", kind.openai_type)
    assert trailers["retry-after"] == "2" and trailers["grpc-retry-pushback-ms"] == "1250"


def test_details_are_there_for_standard_clients_too(front: Front, stub: Any) -> None:
    status_pb2 = pytest.importorskip("google.rpc.status_pb2")
    front.stream(TandemError(ErrorKind.OVERLOADED, "full"))
    trailers = dict(grpc_refusal(consume, stub, "Chat").trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert (status.code, status.message) == (grpc.StatusCode.UNAVAILABLE.value[0], "full")
    detail = pb.ErrorDetail()
    assert status.details[0].type_url == DETAIL_TYPE and status.details[0].Unpack(detail)
    assert detail.kind == "overloaded" and not detail.HasField("param")
    assert (trailers["retry-after"], trailers["x-tandem-reject-reason"]) == ("1", "overloaded")


def test_a_permanent_error_has_no_retry_delay(front: Front, stub: Any) -> None:
    front.stream(TandemError(ErrorKind.INVALID_REQUEST, "never"))
    trailers = dict(grpc_refusal(consume, stub, "Chat").trailing_metadata())
    assert not {"retry-after", "grpc-retry-pushback-ms", "x-tandem-reject-reason"} & trailers.keys()


def test_a_bug_is_an_internal_error_without_its_secrets(
    front: Front, stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    front.stream(RuntimeError("secret"))
    with caplog.at_level(logging.ERROR):
        error = grpc_refusal(consume, stub, "Chat", metadata=(("x-request-id", "mine-2"),))
    assert error.code() is grpc.StatusCode.INTERNAL
    details = str(error.details())
    assert "mine-2" in details and "secret" not in details
    assert "mine-2" in caplog.text and "secret" in caplog.text


@pytest.mark.parametrize("letter", ["x", "ü", "漢", "🦀"])
def test_an_error_that_quotes_much_still_fits_its_metadata(front: Front, stub: Any, letter: str) -> None:
    """Between 8 and 16 KiB a client refuses metadata at random, so the size itself is checked."""
    error = grpc_refusal(stub.Chat, pb.ChatRequest(model=letter * 50_000, messages=HELLO.messages))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert error.details().startswith(f"the model '{letter * 3}")
    message = len(quote(error.details()))
    assert message + sum(32 + len(name) + len(value) * 4 / 3 for name, value in error.trailing_metadata()) < 8192


def test_a_message_over_the_limit_never_reaches_the_dispatch(front: Front, stub: Any) -> None:
    error = grpc_refusal(stub.Complete, pb.CompleteRequest(model="tiny", prompt=[pb.Prompt(text="x" * (1 << 20))]))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert front.dispatch.requests == []


def test_metadata_over_the_limit_is_refused_and_others_go_on(front: Front, stub: Any) -> None:
    front.answer("Hi")
    grpc_refusal(consume, stub, "Chat", metadata=(("x-bomb", "x" * (1 << 20)),))
    consume(stub, "Chat")
    assert len(front.dispatch.requests) == 1


def test_bytes_that_are_no_message_are_refused_and_others_go_on(
    front: Front, stub: Any, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    front.answer("Hi")
    call = channel.unary_unary("/tandem.v1.Inference/Chat", request_serializer=None, response_deserializer=None)
    for garbage in (b"\xff" * 7, b"\x12\x7f", b"\x0a\x02\xff\xfe"):
        with caplog.at_level(logging.CRITICAL):
            grpc_refusal(call, garbage, timeout=PATIENCE_S)
    consume(stub, "Chat")
    assert len(front.dispatch.requests) == 1


# ---- messages


@pytest.mark.parametrize("ends_well", [True, False])
def test_simultaneous_tokens_are_sent_in_one_message(front: Front, stub: Any, *, ends_well: bool) -> None:
    """Tokens that arrived before an error are sent before it."""
    end = front.finished() if ends_well else TandemError(ErrorKind.WORKER_LOST, "gone")
    front.stream("The capital", end).has_more = True
    call, updates = stub.StreamChat(HELLO), []
    try:
        for update in call:
            updates.append(update)
    except grpc.RpcError as error:
        assert not ends_well and error.details() == "gone"  # type: ignore[attr-defined]
    assert [update.choices[0].message.content for update in updates] == ["The capital"]
    assert updates[0].choices[0].finish_reason == ("stop" if ends_well else "")
    assert updates[0].HasField("usage") == ends_well


def test_the_tokens_per_message_are_bounded(front: Front, stub: Any) -> None:
    front.stream(*["The capital"] * 200, front.finished()).has_more = True
    updates = list(stub.StreamChat(HELLO))
    assert "".join(update.choices[0].message.content for update in updates) == "The capital" * 200
    num_tokens = 200 * len(front.ids("The capital"))
    assert len(updates) == 1 + num_tokens // MAX_HELD


def test_a_single_token_is_sent_alone(front: Front, stub: Any) -> None:
    front.answer("The capital")
    contents = [update.choices[0].message.content for update in stub.StreamChat(HELLO)]
    assert len(contents) == len(front.ids("The capital")) + 1 and contents[-1] == ""
