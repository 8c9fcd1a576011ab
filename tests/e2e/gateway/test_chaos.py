"""Test programs that are killed, and clients that disconnect at any moment, while two tenants stream choices and
structured output under quotas: every request ends once, and no block, reservation or queue entry is left anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tandem.wire.channels import open_channel
from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub
from tests.e2e.gateway.http import Answer, Post, completion, send
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import PATIENCE_S, Cluster, Gateway, Redis, Worker, cluster, redis_server, until
from tests.e2e.gateway.tenants import UNLIMITED, key_of, tenants_file
from tests.effort import IS_NIGHTLY

pytestmark = pytest.mark.timeout(240)

KEYS = {name: key_of(name) for name in ("acme", "globex")}
NUM_STREAMS = 20
NUM_CLIENTS = 400 if IS_NIGHTLY else 80


@dataclass(slots=True)
class World:
    """Own two gateways with keys in front of a prefill and a decode worker, around one Redis."""

    cluster: Cluster
    redis: Redis
    tenants: Path
    prefill: Worker
    decode: Worker
    gateways: list[Gateway]

    def serve(self) -> None:
        """Start a new incarnation of every program that has ended, and wait until a request uses both workers."""
        self.redis.start_again()
        for role in ("prefill", "decode"):
            if getattr(self, role).exit_code is not None:
                setattr(self, role, self.cluster.again(getattr(self, role)))
                getattr(self, role).wait_ready()
        for index, gateway in enumerate(self.gateways):
            if gateway.exit_code is not None:
                self.gateways[index] = self.start_gateway(gateway.name)
        for gateway in self.gateways:
            gateway.wait_serving()
            until(lambda gateway=gateway: self.complete(gateway).path == "remote", "a request that is split")  # type: ignore[misc]

    def start_gateway(self, name: str) -> Gateway:
        return self.cluster.gateway(name, "--auth", "keys", "--tenants", str(self.tenants))

    def complete(self, gateway: Gateway) -> Answer:
        return send(gateway.url, completion(4, 0, 2), key=KEYS["acme"])

    def nothing_is_left(self) -> None:
        for worker in (self.prefill, self.decode):
            if worker.exit_code is None:
                until(worker.is_idle, f"an idle {worker.name}")
        for gateway in self.gateways:
            if gateway.exit_code is None:
                until(lambda gateway=gateway: counts(gateway) == (0, 0), f"an idle {gateway.name}")  # type: ignore[misc]
        until(lambda: not self.redis.open_reservations(), "settled reservations")


def counts(gateway: Gateway) -> tuple[float, float]:
    """Return the numbers of open and of queued requests."""
    metrics = gateway.metrics()
    waiting = sum(number for name, number in metrics.items() if name.startswith("tandem_queued_requests"))
    return metrics["tandem_open_requests"], waiting


def num_arrived(gateway: Gateway) -> float:
    """Return the number of requests that ever arrived."""
    metrics = gateway.metrics()
    return metrics["tandem_open_requests"] + sum(
        metrics[name] for name in metrics if name.startswith("tandem_requests_total")
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("chaos")
    tenants = directory / "tenants.yaml"
    tenants.write_text(tenants_file(dict.fromkeys(KEYS, UNLIMITED)))
    with redis_server() as redis, cluster(directory, redis.url, model, *SETTINGS) as programs:
        world = World(programs, redis, tenants, programs.worker("p", "prefill"), programs.worker("d", "decode"), [])
        world.gateways = [world.start_gateway("first"), world.start_gateway("second")]
        programs.wait_serving()
        yield world
        for gateway in world.gateways:
            assert gateway.exit_code is not None or gateway.stop() == 0, "a gateway that no test has killed"


@pytest.fixture
def world(running: World) -> Iterator[World]:
    running.serve()
    running.nothing_is_left()
    yield running
    running.nothing_is_left()
    assert running.cluster.log_lines("Traceback", "ERROR", "never retrieved", "was destroyed") == []


def body(index: int) -> dict[str, Any]:
    """Return the body of the index-th stream: two choices, every other one with structured output, some with a prompt
    long enough to be in its prefill.
    """
    form = {"structured_outputs": {"regex": "[a-z ]+"}} if index % 2 else {}
    given = completion(400 if index % 5 == 0 else 12, 7000 + index, 200, **form)
    return given | {"stream": True, "n": 2, "temperature": 1.0, "seed": index}


def streams(stack: ExitStack, gateway: Gateway) -> list[Post]:
    """All are under way, in whatever state; one at least has begun to answer."""
    keys, before = list(KEYS.values()), num_arrived(gateway)
    posts = [stack.enter_context(Post(gateway.url, body(index), key=keys[index % 2])) for index in range(NUM_STREAMS)]
    posts[1].wait_events(5)
    until(lambda: num_arrived(gateway) == before + NUM_STREAMS, "all of the streams")
    return posts


def end_of(answer: Answer) -> str | None:
    """Return the error code with which a stream ended, or None where all choices finished; check that it ended once."""
    error = answer.error()
    if answer.status != 200:
        assert error is not None
        return str(error["code"])
    events = answer.events()
    if error is not None:
        assert None not in events and [event for event in events if "error" in event] == [events[-1]]
        return str(error["code"])
    assert events[-1] is None and events.count(None) == 1
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1]
    return None


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_killed(world: World, role: str) -> None:
    """The remaining worker continues all requests."""
    with ExitStack() as stack:
        posts = streams(stack, world.gateways[0])
        getattr(world, role).kill()
        answers = [post.finish() for post in posts]
    assert [end_of(answer) for answer in answers] == [None] * NUM_STREAMS
    moved = [answer.about()["attempts"] > 1 for answer in answers]
    assert role == "prefill" or any(moved), "nothing was lost, so this tests nothing"


@pytest.mark.nightly
def test_redis_is_killed_and_begins_anew(world: World) -> None:
    with ExitStack() as stack:
        posts = streams(stack, world.gateways[0])
        world.redis.stop()
        assert world.complete(world.gateways[0]).status == 200
        world.redis.start()
        assert [end_of(post.finish()) for post in posts] == [None] * NUM_STREAMS
    assert world.complete(world.gateways[0]).status == 200


def test_a_gateway_is_killed_and_the_other_settles_for_it(world: World) -> None:
    first, second = world.gateways
    with ExitStack() as stack:
        for post in streams(stack, first)[:3]:
            post.wait_events(1)
        # A gateway that was without Redis a moment ago tells it what is open when it finds it again.
        until(world.redis.open_reservations, "reservations that Redis knows")
        first.kill()
    assert world.redis.open_reservations(), "they were settled before, so this tests nothing"
    world.redis.lapse_reservations()
    for worker in (world.prefill, world.decode):
        until(worker.is_idle, "a worker that gave up what nobody waits for")
    for key in KEYS.values():
        assert send(second.url, completion(4, 1, 1), key=key).status == 200


@pytest.mark.nightly
def test_clients_leave_at_any_moment(world: World) -> None:
    """Clients of every kind use both gateways; many disconnect before they are answered, some after."""
    asyncio.run(_many_clients(world, random.Random(5)))


async def _many_clients(world: World, rng: random.Random) -> None:
    room = asyncio.Semaphore(24)
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        plain, by_openai, by_grpc = _plainly(http), _by_openai(http), _by_grpc()

        async def one(index: int, leaves_s: float) -> None:
            gateway, key = world.gateways[index % 2], list(KEYS.values())[index // 2 % 2]
            send = (plain, by_openai, by_grpc)[index % 3]
            async with room:
                with suppress(TimeoutError):
                    async with asyncio.timeout(leaves_s):
                        await send(gateway, key, {**body(index), "stream": index % 4 != 0})

        await asyncio.gather(*(one(index, rng.expovariate(2.0)) for index in range(NUM_CLIENTS)))


def _plainly(http: httpx.AsyncClient) -> Any:
    async def send(gateway: Gateway, key: str, given: dict[str, Any]) -> None:
        url, headers = f"{gateway.url}/v1/completions", {"x-api-key": key}
        async with http.stream("POST", url, json=given, headers=headers) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_bytes():
                pass

    return send


def _by_openai(http: httpx.AsyncClient) -> Any:
    async def send(gateway: Gateway, key: str, given: dict[str, Any]) -> None:
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, http_client=http, max_retries=0)
        extra = {name: given.pop(name) for name in ("structured_outputs",) if name in given}
        answer = await client.completions.create(**given, extra_body=extra)
        if given["stream"]:
            async for _ in answer:
                pass

    return send


def _by_grpc() -> Any:
    async def send(gateway: Gateway, key: str, given: dict[str, Any]) -> None:
        request = pb.CompleteRequest(
            model="tiny",
            prompt=[pb.Prompt(token_ids=pb.TokenIds(ids=given["prompt"]))],
            max_tokens=given["max_tokens"],
            n=given["n"],
        )
        if form := given.get("structured_outputs"):
            request.structured_outputs.regex = form["regex"]
        async with open_channel(gateway.grpc_target) as channel:
            stub, metadata = InferenceStub(channel), (("x-api-key", key),)
            if given["stream"]:
                async for _ in stub.StreamComplete(request, metadata=metadata):
                    pass
            else:
                await stub.Complete(request, metadata=metadata)

    return send
