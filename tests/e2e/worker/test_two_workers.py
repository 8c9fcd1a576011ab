"""Test one prefill and one decode process: the tokens of one worker, over both transports, and clean ends when one of
them dies, stops for a while, or is told to stop.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.core.errors import ErrorKind
from tandem.core.events import Cancelled, Failed, Finished, FinishReason, Token
from tandem.core.ids import HandoffId, JobKey, RequestId, WorkerRef
from tandem.core.request import GenerateJob, PrefillJob, RemotePrefix, Request, ResumeJob
from tandem.engine.kv_consumer import MIN_PREFIX_FETCH_S
from tandem.wire.gen import worker_pb2 as pb
from tests.e2e.client import Client, hand_over, new_request, settled
from tests.e2e.cluster import WorkerProcess
from tests.e2e.worker.conftest import LEASE_S, MODEL_NAME, Start
from tests.golden.penalties import processors
from tests.scrape import Scrape

_salts = itertools.count(1)


@dataclass(slots=True)
class Pair:
    """Own processes shared by the tests of a module; a test that has killed one replaces it."""

    start: Start
    transport: str
    prefill: WorkerProcess
    decode: WorkerProcess

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[tuple[Client, Client]]:
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(Client(self.prefill.ref))
            consumer = await stack.enter_async_context(Client(self.decode.ref))
            yield producer, consumer

    def replace(self, which: str) -> None:
        """Start a new incarnation under the old name."""
        old: WorkerProcess = getattr(self, which)
        old.stop()
        setattr(self, which, self.start(old.name, which, self.transport))


@pytest.fixture(
    scope="module", params=["nixl", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("local", "tcp"))]
)
def pair(request: pytest.FixtureRequest, start: Start) -> Iterator[Pair]:
    kind = request.param
    prefill, decode = start(f"prefill-{kind}", "prefill", kind), start(f"decode-{kind}", "decode", kind)
    pair = Pair(start, kind, prefill, decode)
    yield pair
    for program in (pair.prefill, pair.decode):
        assert program.exit_code is None, f"{program.name} ended by itself: {program.log}"
        assert program.stop() == 0, program.log


async def scrape(client: Client) -> Scrape:
    reply = await client.stub.Describe(pb.DescribeRequest())
    return await asyncio.to_thread(Scrape.of, reply.metrics_address)


def fresh_request(num_prompt: int, max_tokens: int) -> Request:
    """Return requests of which no two share a prefix, so that all KV has to be computed and transferred."""
    salt = next(_salts)
    prompt = [salt, *((i * 7 + salt) % 200 for i in range(num_prompt - 1))]
    return new_request(MODEL_NAME, prompt, max_tokens)


async def in_one_place(client: Client, request: Request) -> list[int]:
    """Return the tokens that one worker alone produces, whatever it has cached."""
    alone = replace(request, id=type(request.id)(f"{request.id}-alone"), cache_salt=f"alone-{request.id}")
    key = await client.generate(alone)
    assert isinstance(await client.end_of(key), Finished)
    return client.tokens(key)


async def half_computed(producer: Client) -> None:
    """Wait until the producer has leased blocks and is still computing."""
    async with asyncio.timeout(20):
        while not (await producer.books()).num_leased_blocks:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_prompt", [17, 700, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 16, 100))])
async def test_split_in_two_the_tokens_are_the_same(pair: Pair, num_prompt: int) -> None:
    async with pair.clients() as (producer, consumer):
        request = fresh_request(num_prompt, 24)
        key, _ = await hand_over(producer, consumer, request)
        assert isinstance(await consumer.end_of(key), Finished)
        tokens = consumer.tokens(key)
        assert len(tokens) == 24 and producer.tokens(key) == tokens[:1]
        pulled = consumer.pulled(key)
        assert pulled is not None and pulled.num_blocks == -(-num_prompt // 16)
        assert tokens == await in_one_place(producer, request)
        assert tokens == await in_one_place(consumer, request)
        await settled(producer, consumer)


async def test_the_metrics_of_both_workers_add_up(pair: Pair) -> None:
    async with pair.clients() as (producer, consumer):
        befores = [await scrape(client) for client in (producer, consumer)]
        key, _ = await hand_over(producer, consumer, fresh_request(100, 24))
        assert isinstance(await consumer.end_of(key), Finished)
        await settled(producer, consumer)
        gave, took = [await scrape(client) for client in (producer, consumer)]

        def grown(name: str, **attributes: str) -> tuple[float, float]:
            now = (gave.sum(name, **attributes), took.sum(name, **attributes))
            return tuple(new - before.sum(name, **attributes) for new, before in zip(now, befores, strict=True))  # type: ignore[return-value]

        assert grown("tandem_step_prefill_tokens_total") == grown("vllm:prompt_tokens_total") == (100, 0)
        assert grown("tandem_generated_tokens_total") == grown("vllm:generation_tokens_total") == (1, 23)
        assert grown("tandem_jobs_total", kind="prefill", outcome="handed_over") == (1, 0)
        assert grown("tandem_jobs_total", kind="resume", outcome="finished") == (0, 1)
        assert grown("tandem_jobs_total") == (1, 1)
        pulled = consumer.pulled(key)
        assert pulled is not None and pulled.num_blocks == 7
        assert grown("tandem_transfer_bytes_total", transport=pair.transport) == (0, pulled.num_bytes)
        for each in (gave, took):
            used, free = (each.sum("tandem_kv_blocks", state=state) for state in ("used", "free"))
            assert used + free == each.sum("tandem_kv_capacity") > 0
            assert each.sum("process_memory_usage_bytes") > 0


@pytest.fixture(scope="module")
def reference(tiny_directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float64).eval()


@pytest.mark.parametrize("max_tokens", [12, pytest.param(0, marks=pytest.mark.nightly)])
async def test_a_scored_prompt_is_scored_where_it_is_computed(pair: Pair, reference: Any, max_tokens: int) -> None:
    """Both workers have the prompt cached; penalties look back over the hand-off."""
    async with pair.clients() as (producer, consumer):
        request = fresh_request(100, 12)
        for client in (producer, consumer):
            cached = replace(request, id=RequestId(f"{request.id}-{client.worker.id}"))
            await client.end_of(await client.generate(cached))
        penalties: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5}
        sampling = replace(request.sampling, max_tokens=max_tokens, **penalties)
        request = replace(request, sampling=sampling, prompt_logprobs=2)
        key, _ = await hand_over(producer, consumer, request)
        ends = [await client.end_of(key) for client in (producer, consumer)]
        reason = next(end.reason for end in ends if isinstance(end, Finished) and end.reason is not None)
        assert reason is FinishReason.LENGTH and consumer.scores(key) == []
        tokens = consumer.tokens(key)
        assert len(tokens) == max_tokens
        with torch.inference_mode():
            rows = reference(torch.tensor([[*request.prompt_tokens, *tokens]])).logits[0]
        logprobs = torch.log_softmax(rows, -1)
        scores = producer.scores(key)
        assert [score.id for score in scores] == list(request.prompt_tokens[1:])
        assert [s.logprob for s in scores] == pytest.approx(
            [float(r[s.id]) for r, s in zip(logprobs, scores, strict=False)], abs=1e-9
        )
        for index, token in enumerate(tokens):
            known = torch.tensor([[*request.prompt_tokens, *tokens[:index]]])
            row = rows[len(request.prompt_tokens) + index - 1][None]
            for processor in processors(sampling, len(request.prompt_tokens)):
                row = processor(known, row)
            assert token == int(row.argmax())
        await settled(producer, consumer)


async def test_many_at_once_in_both_directions(pair: Pair) -> None:
    async with pair.clients() as (one, two):
        started = []
        for i in range(10):
            producer, consumer = (one, two) if i % 2 else (two, one)
            request = fresh_request(20 + 37 * i, 16)
            started.append((consumer, request, (await hand_over(producer, consumer, request))[0]))
        for consumer, request, key in started:
            end = await consumer.end_of(key)
            assert isinstance(end, Finished), end
            assert consumer.tokens(key) == await in_one_place(consumer, request)
        await settled(one, two)
    assert pair.prefill.complaints() + pair.decode.complaints() == []


@pytest.mark.parametrize("state", ["half computed", pytest.param("decoding", marks=pytest.mark.nightly)])
async def test_cancel(pair: Pair, state: str) -> None:
    async with pair.clients() as (producer, consumer):
        key, _ = await hand_over(producer, consumer, fresh_request(1500, 2000))
        if state == "half computed":
            await half_computed(producer)
        else:
            await consumer.num_tokens(key, 3)
        await asyncio.gather(producer.cancel(key), consumer.cancel(key))
        # The source's cancellation may arrive before the consumer's own; then nothing is left to hand over.
        ends = [Cancelled(key)] if state == "decoding" else [Cancelled(key), Finished(key, None, 0, 0)]
        assert await consumer.end_of(key) in ends
        await settled(producer, consumer)


@pytest.mark.nightly
async def test_prefill_killed_in_mid_prefill(pair: Pair) -> None:
    async with pair.clients() as (producer, consumer):
        key, _ = await hand_over(producer, consumer, fresh_request(3000, 8))
        await half_computed(producer)
        pair.prefill.kill()
        await consumer.failure(key, ErrorKind.KV_LOST)
        await consumer.settled()
        pair.replace("prefill")
    await works(pair)


@pytest.mark.nightly
async def test_decode_killed_in_mid_decode(pair: Pair) -> None:
    async with pair.clients() as (producer, consumer):
        key, _ = await hand_over(producer, consumer, fresh_request(200, 3000))
        await consumer.num_tokens(key, 3)
        pair.decode.kill()
        await consumer.until(lambda: consumer.stream_error is not None)
        await producer.settled()
        pair.replace("decode")
    await works(pair)


async def test_decode_killed_in_mid_transfer_gives_the_lease_back(pair: Pair) -> None:
    async with pair.clients() as (producer, consumer):
        key, _ = await hand_over(producer, consumer, fresh_request(3000, 8))
        await half_computed(producer)
        pair.decode.kill()
        # Nobody renews the lease: the prefill fails rather than compute for nobody.
        failed = await producer.end_of(key)
        assert isinstance(failed, Failed | Finished)
        await producer.settled()
        pair.replace("decode")
    await works(pair)


@pytest.mark.nightly
async def test_a_prefill_worker_resumed_late_harms_no_request(pair: Pair) -> None:
    async with pair.clients() as (producer, consumer):
        request = fresh_request(3000, 8)
        key, _ = await hand_over(producer, consumer, request)
        await half_computed(producer)
        pair.prefill.signal(signal.SIGSTOP)
        await consumer.failure(key, ErrorKind.KV_LOST)
        assert consumer.tokens(key) == []
        await asyncio.sleep(LEASE_S)
        pair.prefill.signal(signal.SIGCONT)
        await producer.end_of(key)
        await settled(producer, consumer)
        # The same request again, as a new attempt from the same two workers.
        again, _ = await hand_over(producer, consumer, request, attempt=2)
        assert isinstance(await consumer.end_of(again), Finished)
        assert consumer.tokens(again) == await in_one_place(consumer, request)
        await settled(producer, consumer)


@pytest.mark.nightly
async def test_a_worker_finishes_running_jobs_on_a_stop_signal(pair: Pair) -> None:
    async with pair.clients() as (producer, consumer):
        request = fresh_request(60, 100)
        expected = await in_one_place(producer, request)
        key, _ = await hand_over(producer, consumer, request)
        await consumer.num_tokens(key, 2)
        pair.decode.signal(signal.SIGTERM)
        assert isinstance(await consumer.end_of(key), Finished)
        assert consumer.tokens(key) == expected
        assert await asyncio.to_thread(pair.decode.wait) == 0
        pair.replace("decode")
    await works(pair)


@pytest.mark.nightly
async def test_a_second_signal_ends_a_worker_at_once(pair: Pair) -> None:
    async with pair.clients() as (producer, consumer):
        key = await consumer.generate(fresh_request(60, 5000))
        await consumer.num_tokens(key, 2)
        pair.decode.signal(signal.SIGTERM)
        await consumer.until(lambda: consumer.load.draining)
        pair.decode.signal(signal.SIGTERM)
        await consumer.failure(key, ErrorKind.WORKER_LOST)
        assert await asyncio.to_thread(pair.decode.wait) == 0
        pair.replace("decode")
        await producer.settled()
    await works(pair)


async def fetch_prefix(consumer: Client, source: WorkerRef, request: Request) -> JobKey:
    """Generate with a prefix that the source is predicted to have."""
    num_blocks = len(request.prompt_tokens) // 16
    prefix = RemotePrefix(handoff=HandoffId(f"loan-{request.id}"), source=source, num_blocks=num_blocks)
    job = GenerateJob(request=request, attempt=1, prefix=prefix)
    await consumer.submit(job)
    return job.key


def num_cached(client: Client, key: JobKey) -> int | None:
    return next(event.num_cached_tokens for event in client.events[key] if isinstance(event, Token))


async def fetch_between(producer: Client, consumer: Client, num_prompt: int) -> tuple[Request, JobKey, JobKey]:
    """Return a request, its key, and which workers computed it and read its prefix. Another request is sent where the
    machine was so busy that the consumer gave the producer up, which is no failure.
    """
    for _ in range(5):
        request = fresh_request(num_prompt, 24)
        first = await producer.generate(request)
        await producer.end_of(first)
        again = replace(request, id=RequestId(f"{request.id}-again"))
        began = time.monotonic()
        key = await fetch_prefix(consumer, producer.worker, again)
        await consumer.num_tokens(key, 1)
        waited_s = time.monotonic() - began
        assert isinstance(await consumer.end_of(key), Finished)
        assert consumer.tokens(key) == producer.tokens(first)
        if consumer.pulled(key) is not None or waited_s < MIN_PREFIX_FETCH_S:
            return request, first, key
    raise AssertionError("no loan shows a sign of itself in time")


@pytest.mark.parametrize("num_prompt", [100, *(pytest.param(n, marks=pytest.mark.nightly) for n in (17, 700))])
async def test_a_prefix_that_another_worker_has_is_read_and_the_tokens_are_the_same(
    pair: Pair, num_prompt: int
) -> None:
    async with pair.clients() as (producer, consumer):
        request, first, key = await fetch_between(producer, consumer, num_prompt)
        num_blocks = (num_prompt - 1) // 16
        pulled = consumer.pulled(key)
        assert pulled is not None and (pulled.num_blocks, pulled.source) == (num_blocks, pair.prefill.ref)
        assert num_cached(consumer, key) == 16 * num_blocks
        # Back again from where it grew: the producer has the prompt, and lacks nothing of it.
        back = await fetch_prefix(producer, pair.decode.ref, replace(request, id=RequestId(f"{request.id}-back")))
        assert isinstance(await producer.end_of(back), Finished)
        assert producer.tokens(back) == producer.tokens(first) and producer.pulled(back) is None
        await settled(producer, consumer)


@pytest.mark.nightly
async def test_many_prefixes_are_read_in_both_directions_beside_hand_offs(pair: Pair) -> None:
    async with pair.clients() as (one, two):
        started = []
        for i in range(8):
            producer, consumer = (one, two) if i % 2 else (two, one)
            request = fresh_request(60 + 50 * i, 12)
            await producer.end_of(await producer.generate(request))
            again = replace(request, id=RequestId(f"{request.id}-again"))
            started.append((consumer, again, await fetch_prefix(consumer, producer.worker, again)))
            other = fresh_request(100, 8)
            started.append((consumer, other, (await hand_over(producer, consumer, other))[0]))
        for consumer, request, key in started:
            assert isinstance(await consumer.end_of(key), Finished)
            assert consumer.tokens(key) == await in_one_place(consumer, request)
        await settled(one, two)
    assert pair.prefill.complaints() + pair.decode.complaints() == []


@pytest.mark.parametrize(
    "fate", ["evicts it", *(pytest.param(fate, marks=pytest.mark.nightly) for fate in ("stands still", "dies"))]
)
async def test_a_job_whose_source_fails_is_computed_locally(pair: Pair, fate: str) -> None:
    async with pair.clients() as (producer, consumer):
        request = fresh_request(1200, 8)
        if fate != "evicts it":
            await producer.end_of(await producer.generate(request))
        again = replace(request, id=RequestId(f"{request.id}-again"))
        if fate == "stands still":
            pair.prefill.signal(signal.SIGSTOP)
        key = await fetch_prefix(consumer, pair.prefill.ref, again)
        if fate == "dies":
            # Some of it may have been read by then, or all.
            pair.prefill.kill()
        end = await consumer.end_of(key)
        assert isinstance(end, Finished), end
        assert num_cached(consumer, key) == 0 or fate == "dies"
        if fate == "stands still":
            pair.prefill.signal(signal.SIGCONT)
        assert consumer.tokens(key) == await in_one_place(consumer, again)
        await consumer.settled()
        if fate == "dies":
            pair.replace("prefill")
        else:
            await producer.settled()
    await works(pair)


async def works(pair: Pair) -> None:
    """Run a hand-off between the two current processes."""
    async with pair.clients() as (producer, consumer):
        request = fresh_request(100, 8)
        key, _ = await hand_over(producer, consumer, request)
        end = await consumer.end_of(key)
        assert isinstance(end, Finished), end
        assert consumer.tokens(key) == await in_one_place(producer, request)
        await settled(producer, consumer)


@pytest.mark.nightly
def test_a_model_that_is_not_there_is_one_line_and_a_status(tmp_path: Path) -> None:
    process = WorkerProcess(tmp_path, "lost", "--model", str(tmp_path / "nowhere"))
    assert process.wait() == 1
    assert process.stop() == 1
    assert "nowhere" in process.log and "Traceback" not in process.log


async def test_choices_share_one_hand_off_and_equal_single_requests(pair: Pair) -> None:
    plain = fresh_request(50, 12)
    request = replace(plain, sampling=replace(plain.sampling, temperature=0.9, seed=7))
    async with pair.clients() as (producer, consumer):
        alone = []
        for choice in range(3):
            own = replace(request, id=RequestId(f"{request.id}-{choice}"), cache_salt=f"alone-{choice}")
            job = GenerateJob(request=own, attempt=1, choice=choice)
            await producer.submit(job)
            assert isinstance(await producer.end_of(job.key), Finished)
            alone.append(producer.tokens(job.key))
        assert len(set(map(tuple, alone))) == 3, "choices differ"
        handoff = HandoffId(f"h-{request.id}")
        resume = ResumeJob(request=request, attempt=1, num_choices=4, handoff=handoff, source=pair.prefill.ref)
        await consumer.submit(resume)
        await consumer.cancel(resume.keys[3])
        await producer.submit(PrefillJob(request=request, attempt=1, num_choices=4, handoff=handoff))
        ends = [await consumer.end_of(key) for key in resume.keys]
        assert isinstance(ends[3], Cancelled) and all(isinstance(end, Finished) for end in ends[:3])
        assert [consumer.tokens(key) for key in resume.keys[:3]] == alone
        firsts = [(await producer.end_of(key), producer.tokens(key)) for key in resume.keys]
        assert [tokens for _, tokens in firsts[:3]] == [tokens[:1] for tokens in alone]
        assert all(isinstance(end, Finished) for end, _ in firsts)
        assert len(consumer.tokens(resume.keys[3])) <= 1
