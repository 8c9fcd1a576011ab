"""Test what clients get over gRPC from two real workers: HTTP's answers, clean ends, and a graceful shutdown."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.wire.channels import CHANNEL_OPTIONS
from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub
from tests.e2e.calm.test_openai_client import FORM
from tests.e2e.gateway.http import LONG_ANSWER, prompt
from tests.e2e.gateway.pair import Pair
from tests.e2e.gateway.processes import PATIENCE_S, Gateway, until
from tests.unit.gateway.parity import send_over_both_protocols

CHAT = {"messages": [{"role": "user", "content": "What is the capital of 中国?"}]}
SEEDED = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 11}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "drawn chat": ("chat", {**CHAT, **SEEDED, "presence_penalty": 0.5, "return_token_ids": True}),
    "choices": ("chat", {**CHAT, **SEEDED, "n": 3, "return_token_ids": True}),
    "choices in a form": ("chat", {**FORM, "return_token_ids": True}),
    "text": ("completion", {"prompt": "Grüße aus", "logprobs": 1, "logit_bias": {"70": 2}}),
    "token ids": ("completion", {"prompt": prompt(40, 800), **SEEDED, "return_token_ids": True}),
    "several": ("completion", {"prompt": ["a b c", "größer"], "stop": ["q"]}),
    "scores": ("completion", {"prompt": "größer als", "echo": True, "logprobs": 2, "max_tokens": 0}),
    "too long": ("completion", {"prompt": [5], "max_tokens": 10**6}),
    "nobody": ("chat", {**CHAT, "model": "nobody"}),
}


@contextmanager
def connected(gateway: Gateway) -> Iterator[Any]:
    with grpc.insecure_channel(gateway.grpc_target, options=CHANNEL_OPTIONS) as channel:
        yield InferenceStub(channel)  # type: ignore[arg-type]


def completion(length: int, salt: int, max_tokens: int) -> pb.CompleteRequest:
    tokens = pb.TokenIds(ids=prompt(length, salt))
    return pb.CompleteRequest(
        model="tiny", prompt=[pb.Prompt(token_ids=tokens)], max_tokens=max_tokens, temperature=0.0
    )


def kind_of(error: Any) -> str:
    """Return the kind of an error, which is in its trailers."""
    return pb.ErrorDetail.FromString(dict(error.trailing_metadata())["tandem-error-bin"]).kind


@pytest.mark.parametrize(("kind", "given"), CASES.values(), ids=CASES)
def test_all_four_calls_get_the_same_answer(calm: Pair, kind: str, given: dict[str, Any]) -> None:
    body = {"model": "tiny", "temperature": 0, "max_tokens": 12, **given}
    with (
        connected(calm.gateway) as stub,
        httpx.Client(base_url=calm.gateway.url, timeout=PATIENCE_S, trust_env=False) as http,
    ):
        outcomes = send_over_both_protocols(http, stub, kind, body)
    for outcome in outcomes:
        outcome.usage = outcome.usage[:3]  # the number of cached tokens depends on earlier requests
        assert outcome.error or outcome.path.startswith("remote")
    assert [outcome.plain() for outcome in outcomes] == [outcomes[0].plain()] * 4


@pytest.mark.parametrize("num_read", [0, 5])
def test_a_disconnected_client_leaves_nothing_behind(calm: Pair, num_read: int) -> None:
    with connected(calm.gateway) as stub:
        call = stub.StreamComplete(completion(40, 810 + num_read, LONG_ANSWER))
        for _ in range(num_read):
            next(call)
        until(lambda: calm.decode.books().num_table_blocks > 0, "decoding")
        call.cancel()
        calm.wait_idle()


@pytest.mark.parametrize("method", ["Complete", "StreamComplete"])
def test_a_deadline_ends_a_request_everywhere(calm: Pair, method: str) -> None:
    label = f"late-{method}"
    ended = f"request ended: deadline_exceeded request_id={label}"
    calm.gateway.expected.append(ended)
    with connected(calm.gateway) as stub:
        method_stub = getattr(stub, method)
        with pytest.raises(grpc.RpcError) as late:
            metadata = (("x-request-id", label),)
            answer = method_stub(completion(40, 820, LONG_ANSWER), timeout=0.5, metadata=metadata)
            for _ in answer if method == "StreamComplete" else ():
                pass
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        calm.wait_idle()
    until(lambda: ended in calm.gateway.log, "the log line, whether the client or the gateway noticed the deadline")


@pytest.mark.nightly
def test_a_shutdown_lets_streams_end_and_refuses_new_calls(calm: Pair) -> None:
    gateway = calm.cluster.gateway("ending-grpc")
    gateway.wait_serving()
    with connected(gateway) as stub:
        call = stub.StreamComplete(completion(40, 830, 1500))
        updates = [next(call)]
        gateway.signal(signal.SIGTERM)

        def refused() -> bool:
            with pytest.raises(grpc.RpcError) as refusal:
                stub.Complete(completion(4, 831, 1))
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            return kind_of(refusal.value) == "draining"

        assert until(refused, "a gateway that takes nothing new")
        updates += list(call)
    assert updates[-1].usage.completion_tokens == 1500 and updates[-1].choices[0].finish_reason == "length"
    assert gateway.wait() == 0
    calm.wait_idle()


@pytest.mark.nightly
def test_a_stream_longer_than_the_drain_ends_with_a_typed_error(calm: Pair) -> None:
    gateway = calm.cluster.gateway("cutting-grpc", "--gateway-drain-s", "0.2")
    gateway.wait_serving()
    with grpc.insecure_channel(gateway.grpc_target, options=CHANNEL_OPTIONS) as channel:
        stub: Any = InferenceStub(channel)  # type: ignore[arg-type]
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        call = stub.StreamComplete(completion(40, 840, LONG_ANSWER))
        next(call)
        gateway.signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as cut:
            for _ in call:
                pass
        assert [update.status for update in watch] == [health_pb2.HealthCheckResponse.NOT_SERVING]
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    assert kind_of(cut.value) == "draining"
    assert gateway.wait() == 0
    calm.wait_idle()
    calm.cluster.programs.remove(gateway)  # errors in its log are expected
    (complaint,) = gateway.complaints()
    gateway.stop()
    assert "aborted 1 requests" in complaint
