"""Run clients that send requests without a pause and compare every answer with that of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import msgspec

from tandem.wire.channels import open_channel
from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub
from tests.chaos.random_requests import Answered, ChaosRequest

ANSWER_S = 120.0
"""A client that waits for this long has been forgotten."""
RESEND_S = 0.05


@dataclass(eq=False, slots=True)
class Target:
    """One life of a gateway. `was_killed` is set before it is."""

    name: str
    url: str
    grpc_target: str
    was_killed: bool = False


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it. `problem`: None when the answer is the one of an undisturbed run; `wait_s`:
    until the first event of a stream, `stall_s`: the longest time between two."""

    request: str
    gateway: str
    began: float
    ended: float = 0.0
    wait_s: float = 0.0
    stall_s: float = 0.0
    num_resent: int = 0
    problem: str | None = None
    path: str = ""


class AnswerError(Exception):
    """A gateway answered with an error."""


@dataclass(slots=True)
class Seen:
    """What a client has received of one answer."""

    choices: list[Answered]
    last: float
    wait_s: float | None = None
    stall_s: float = 0.0
    path: str = ""

    def event(self) -> None:
        now = time.monotonic()
        since_s, self.last = now - self.last, now
        if self.wait_s is None:
            self.wait_s = since_s
        else:
            self.stall_s = max(self.stall_s, since_s)

    def add_extension(self, about: dict[str, Any] | None) -> None:
        self.path = (about or {}).get("path", self.path)


async def send_once(
    http: httpx.AsyncClient, target: Target, request: ChaosRequest, key: str, extra: dict[str, Any]
) -> Seen:
    """Send a request and return what was received. Raises AnswerError for an error of the gateway, OSError or a
    transport's error for a connection that broke."""
    seen = Seen([Answered.empty() for _ in range(request.num_choices)], time.monotonic())
    if request.over_grpc:
        await _by_grpc(target, request, key, extra, seen)
    elif extra.get("stream"):
        await _streamed(http, target, request, key, extra, seen)
    else:
        await _whole(http, target, request, key, extra, seen)
    return seen


async def _whole(
    http: httpx.AsyncClient, target: Target, request: ChaosRequest, key: str, extra: dict[str, Any], seen: Seen
) -> None:
    answer = await http.post(f"{target.url}/v1/completions", json=request.body | extra, headers={"x-api-key": key})
    if answer.status_code != 200:
        raise AnswerError(f"{answer.status_code}: {answer.text}")
    document = answer.json()
    seen.add_extension(document.get("tandem"))
    for choice in document["choices"]:
        seen.choices[choice["index"]].add(choice)


async def _streamed(
    http: httpx.AsyncClient, target: Target, request: ChaosRequest, key: str, extra: dict[str, Any], seen: Seen
) -> None:
    url, headers = f"{target.url}/v1/completions", {"x-api-key": key}
    async with http.stream("POST", url, json=request.body | extra, headers=headers) as answer:
        if answer.status_code != 200:
            raise AnswerError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        is_done = False
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            assert not is_done, "an event after [DONE]"
            seen.event()
            if line == "data: [DONE]":
                is_done = True
                continue
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                raise AnswerError(str(event["error"]))
            seen.add_extension(event.get("tandem"))
            for choice in event["choices"]:
                seen.choices[choice["index"]].add(choice)
        if not is_done:
            raise httpx.RemoteProtocolError("the stream ended without [DONE]")


async def _by_grpc(target: Target, request: ChaosRequest, key: str, extra: dict[str, Any], seen: Seen) -> None:
    given = {name: value for name, value in (request.body | extra).items() if name not in ("prompt", "stream")}
    message = pb.CompleteRequest(prompt=[pb.Prompt(token_ids=pb.TokenIds(ids=request.body["prompt"]))], **given)
    async with open_channel(target.grpc_target) as channel:
        try:
            async for reply in InferenceStub(channel).StreamComplete(  # type: ignore[attr-defined]
                message, metadata=(("x-api-key", key),), timeout=ANSWER_S
            ):
                seen.event()
                seen.path = reply.path or seen.path
                for choice in reply.choices:
                    seen.choices[choice.index].add(
                        {"token_ids": list(choice.token_ids), "finish_reason": choice.finish_reason or None}
                    )
        except grpc.aio.AioRpcError as error:
            # A status that a gateway chose has its name in the trailers; a connection that broke has none.
            if any(name == "tandem-error-bin" for name, _ in error.trailing_metadata() or ()):
                raise AnswerError(f"{error.code().name}: {error.details()}") from None
            raise ConnectionResetError(error.details()) from None


@dataclass(slots=True)
class Report:
    """`num_open` are under way now."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_open: int = 0

    def problems(self) -> list[str]:
        return [f"{one.request} at {one.gateway}: {one.problem}" for one in self.outcomes if one.problem]


class Load:
    """Runs in a thread of its own between `start` and `stop`. `targets` gives the gateways that live."""

    def __init__(
        self,
        requests: Sequence[ChaosRequest],
        expected: Sequence[Seen],
        keys: Sequence[str],
        targets: Callable[[], list[Target]],
    ) -> None:
        self.report = Report()
        self._requests = requests
        self._expected = expected
        self._keys = keys
        self._targets = targets
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, seed: int, num_clients: int) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(seed, num_clients)), name="load")
        self._thread.start()

    def stop(self) -> None:
        """Let every client get its last answer."""
        self._is_over.set()
        assert self._thread is not None
        self._thread.join()

    async def _run(self, seed: int, num_clients: int) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S, limits=limits) as http:
            await asyncio.gather(*(self._client(http, random.Random(f"{seed} {n}")) for n in range(num_clients)))

    async def _client(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while not self._is_over.is_set():
            index, key = rng.randrange(len(self._requests)), rng.choice(self._keys)
            extra: dict[str, Any] = {"cache_salt": f"{rng.random()}"} if rng.random() < 0.6 else {}
            if rng.random() < 0.7:
                extra["stream"] = True
            self.report.num_open += 1
            try:
                await self._one(http, index, key, extra, rng.random())
            finally:
                self.report.num_open -= 1

    async def _one(self, http: httpx.AsyncClient, index: int, key: str, extra: dict[str, Any], where: float) -> None:
        """One request to its end; again, at another gateway, where the first was killed under it."""
        request = self._requests[index]
        outcome = Outcome(request.name, "", time.monotonic())
        self.report.outcomes.append(outcome)
        while True:
            targets = [target for target in self._targets() if not target.was_killed]
            if not targets:
                await asyncio.sleep(RESEND_S)
                continue
            target = targets[int(where * len(targets))]
            outcome.gateway = target.name
            try:
                seen = await send_once(http, target, request, key, extra)
            except (httpx.TransportError, OSError) as error:
                if target.was_killed:
                    outcome.num_resent += 1
                    continue
                outcome.problem = f"its connection broke: {error!r}"
            except Exception as error:
                outcome.problem = f"{type(error).__name__}: {error}"
            else:
                self._compare(outcome, seen, self._expected[index])
            outcome.ended = time.monotonic()
            return

    def _compare(self, outcome: Outcome, seen: Seen, expected: Seen) -> None:
        outcome.wait_s, outcome.stall_s, outcome.path = seen.wait_s or 0.0, seen.stall_s, seen.path
        for index, (one, other) in enumerate(zip(seen.choices, expected.choices, strict=True)):
            if (difference := one.differs(other)) is not None:
                outcome.problem = f"choice {index}: {difference}"


def undisturbed(target: Target, requests: Sequence[ChaosRequest], key: str) -> list[Seen]:
    """Return the answers of one gateway to all requests while there is no fault."""

    async def run() -> list[Seen]:
        room = asyncio.Semaphore(8)
        async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as http:

            async def one(request: ChaosRequest) -> Seen:
                async with room:
                    return await send_once(http, target, ChaosRequest(request.name, request.body, False), key, {})

            return await asyncio.gather(*map(one, requests))

    return asyncio.run(run())
