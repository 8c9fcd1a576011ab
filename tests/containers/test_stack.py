"""Test deploy/compose.yaml: completions over both protocols, a worker and a Redis that end, and who may write where."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub
from tests.containers.compose import GRPC, MODEL, SERVICES, Stack, until

QUESTION = "What is the capital of France?"


def test_a_chat_goes_from_a_prefill_to_a_decode_worker(stack: Stack) -> None:
    answer = stack.chat(QUESTION)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    assert answer.json()["tandem"]["path"] == "remote"


def test_grpc_gives_the_same_answer(stack: Stack) -> None:
    question = pb.ChatRequest(model=MODEL, messages=[pb.ChatMessage(role="user", content=QUESTION)], temperature=0.0)
    with grpc.insecure_channel(GRPC) as channel:
        answer = InferenceStub(channel).Chat(question, timeout=60)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == stack.chat(QUESTION).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("service", SERVICES[1:])
def test_a_container_has_only_what_it_needs(stack: Stack, service: str) -> None:
    container = stack.container(service)
    host = container["HostConfig"]
    assert container["State"]["Health"]["Status"] == "healthy"
    assert host["CapDrop"] == ["ALL"] and not host["Privileged"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["ReadonlyRootfs"] == (service == "gateway")
    assert stack.within(service, "id", "-u").strip() != "0"


def test_volumes_belong_to_the_programs_user(stack: Stack) -> None:
    assert stack.within("gateway", "stat", "-c", "%u %a", "/cluster/secret").split() == ["10001", "600"]
    assert stack.within("prefill", "stat", "-c", "%u", "/cache", "/cache/tandem").split() == ["10001", "10001"]
    with pytest.raises(AssertionError, match="Read-only file system"):
        stack.within("prefill", "touch", "/cluster/secret")


def test_a_killed_worker_costs_no_request(stack: Stack) -> None:
    """Answers that a decode worker was writing when it died are finished. The engine restarts it, and it serves."""
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(stack.chat, f"{QUESTION} ({number})", 400) for number in range(4)]
        # Until all KV has moved: see docs/kv-transfer.md on a worker that is killed while it reads.
        until(lambda: stack.num_running("decode") == 4, "four requests are decoded")
        stack.kill("decode")
        found = [answer.result() for answer in answers]
    assert [answer.status_code for answer in found] == [200] * 4, [answer.text for answer in found]
    assert (stack.num_restarts("decode"), stack.num_restarts("prefill")) == (1, 0)
    stack.wait_until_healthy("decode")
    _wait_for_path(stack, "remote")


def test_requests_are_served_while_redis_restarts(stack: Stack) -> None:
    stack.compose("stop", "redis")
    assert stack.chat(QUESTION).status_code == 200
    stack.compose("start", "redis")
    stack.wait_until_healthy("redis")
    _wait_for_path(stack, "remote")


def _wait_for_path(stack: Stack, path: str) -> None:
    until(lambda: stack.chat(QUESTION).json()["tandem"]["path"] == path, f"a request takes the path {path}")
