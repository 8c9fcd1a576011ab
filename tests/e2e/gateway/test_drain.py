"""A decode worker that is told to end while it streams: all that it runs goes on at another, token by token, and
nothing of it is computed again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.stores.worker_registry import WorkerRegistry
from tests.e2e.gateway.http import Answer, Post, completion
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import Cluster, Gateway, Worker, cluster, until

pytestmark = pytest.mark.timeout(240)

NAMESPACE = "drain"
NUM_TOKENS = 400
FORM = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": NUM_TOKENS}
DRAWN = {"temperature": 1.0, "top_p": 0.95, "seed": 17}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": DRAWN,
    "penalties": {**DRAWN, "presence_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 2},
    "choices": {**DRAWN, "n": 3},
    "form": {**DRAWN, "response_format": {"type": "json_schema", "json_schema": {"name": "colours", "schema": FORM}}},
}
NUM_SEQUENCES = sum(kind.get("n", 1) for kind in KINDS.values())


def bodies() -> list[dict[str, Any]]:
    asked = enumerate(KINDS.values())
    return [completion(40 + index, 600 + index, NUM_TOKENS, return_token_ids=True, **kind) for index, kind in asked]


def drawn(answer: Answer) -> dict[int, tuple[list[int], list[float], str]]:
    """Of each choice its tokens, what was told of their probabilities, and why it ended."""
    assert answer.error() is None, answer.error()
    told: dict[int, tuple[list[int], list[float], str]] = {}
    for event in answer.events():
        for choice in (event or {}).get("choices", ()):
            ids, logprobs, _ = told.get(choice["index"], ([], [], ""))
            ids += choice.get("token_ids") or []
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
            told[choice["index"]] = ids, logprobs, choice["finish_reason"] or ""
    return told


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, redis_url: str, model: Path) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("drain")
    own = ("--namespace", NAMESPACE, "--worker-drain-s", "60", "--worker-timeout-s", "30", "--gateway-grace-s", "30")
    with cluster(directory, redis_url, model, *SETTINGS, *own) as running:
        yield running


def take_for(redis_url: str, worker: Worker, role: str) -> None:
    """As `tandem role`."""

    async def say() -> bool:
        registry = WorkerRegistry(redis_url, NAMESPACE)
        try:
            told = worker.ready
            ref = WorkerRef(WorkerId(told["worker"]), Incarnation(told["incarnation"]), told["address"])
            return await registry.set_role(ref, role)
        finally:
            await registry.close()

    assert asyncio.run(say())


def num_decoding(gateway: Gateway) -> float:
    return gateway.metrics()['tandem_live_workers{pool="decode"}']


def test_all_streams_of_a_decode_worker_that_ends_go_on_at_another(running: Cluster, redis_url: str) -> None:
    """The other one decodes only from then on, so that all of them begin at the first."""
    prefill, leaving, taking = (running.worker(*told) for told in (("p", "prefill"), ("d", "decode"), ("t", "prefill")))
    gateway = running.gateway("gateway", "--disaggregation", "prefer")
    for program in running.programs:
        program.wait_ready()
    gateway.wait_serving()
    with ExitStack() as stack:
        calm = [stack.enter_context(Post(gateway.url, body | {"stream": True})) for body in bodies()]
        expected = [drawn(post.finish()) for post in calm]
        posts = [stack.enter_context(Post(gateway.url, body | {"stream": True})) for body in bodies()]
        for post in posts:
            post.wait_events(20)
        assert leaving.books().num_sequences == NUM_SEQUENCES
        # It stands still meanwhile, or a fast one would be done before there is another.
        leaving.signal(signal.SIGSTOP)
        take_for(redis_url, taking, "decode")
        until(lambda: num_decoding(gateway) == 2, "a second decode worker")
        leaving.signal(signal.SIGTERM)
        leaving.signal(signal.SIGCONT)
        answers = [post.finish() for post in posts]
    assert leaving.wait() == 0
    assert [drawn(answer) for answer in answers] == expected
    assert [(about["path"], about["attempts"]) for about in (answer.about() for answer in answers)] == [
        ("remote;moves=1", 2)
    ] * len(answers)
    assert f"drain finished: {NUM_SEQUENCES} migrated, 0 requeued, 0 unfinished" in leaving.log
    for worker in (prefill, taking):
        until(worker.is_idle, f"an idle {worker.name}")
    assert not [line for program in running.programs for line in program.log.splitlines() if "ERROR" in line]
