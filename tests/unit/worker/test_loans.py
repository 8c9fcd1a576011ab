"""Prefixes that one worker reads from another's cache, over real gRPC and the local transport: what is read is not
computed, and whatever goes wrong the job is computed where it is, with the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.core.config import HandoffConfig
from tandem.core.events import Cancelled, Finished, FinishReason, Pulled, Token
from tandem.core.ids import BlockHash, HandoffId, HandoffKey, Incarnation, JobKey, WorkerRef
from tandem.core.request import Generate, Prefill, RemotePrefix, Request, Resume
from tandem.engine import taker as taking
from tandem.kv.handoff import MAX_BORROWED, Borrow
from tandem.worker.link import Link
from tests.e2e.client import PATIENCE_S, new_request
from tests.unit.worker.conftest import Gate, Node, Nodes, pace
from tests.unit.worker.fake_model import MODEL, continuation

PROMPT = list(range(1, 60))
NUM_BLOCKS = 14
"""Those of PROMPT of which a hit may be."""
QUICK = HandoffConfig(lease_s=1.0, pull_timeout_s=0.5, drain_timeout_s=1.0)
PATIENT_S = 4.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake model computes these prompts in no time, so a loan would be given up after the least time there is, which
    two workers and a test in one process on a busy machine do not always keep."""
    monkeypatch.setattr(taking, "LEAST_LOAN_S", PATIENT_S)
    monkeypatch.setattr(taking, "MOST_LOAN_S", PATIENT_S)


async def warm(node: Node, prompt: Sequence[int] = PROMPT) -> None:
    """Let a worker cache a prompt."""
    key = await node.client.generate(new_request(MODEL, prompt, 1))
    await node.client.end_of(key)


def prefix_at(source: WorkerRef, request: Request, num_blocks: int = NUM_BLOCKS) -> RemotePrefix:
    return RemotePrefix(handoff=HandoffId(f"loan-{request.id}"), source=source, num_blocks=num_blocks)


async def borrow(node: Node, source: WorkerRef, request: Request, num_blocks: int = NUM_BLOCKS) -> JobKey:
    job = Generate(request=request, attempt=1, prefix=prefix_at(source, request, num_blocks))
    await node.client.submit(job)
    return job.key


def num_cached(node: Node, key: JobKey) -> int | None:
    return next(e.num_cached_tokens for e in node.client.events[key] if isinstance(e, Token))


async def ends_right(node: Node, key: JobKey, prompt: Sequence[int], num_cached_tokens: int) -> None:
    """The job says how many tokens it did not compute."""
    end = await node.client.end_of(key)
    tokens = node.client.tokens(key)
    assert end == Finished(key, FinishReason.LENGTH, len(tokens), num_cached_tokens)
    assert tokens == continuation(prompt, len(tokens)) and num_cached(node, key) == num_cached_tokens


async def settled(*nodes: Node) -> None:
    for node in nodes:
        await node.client.settled()


@pytest.mark.parametrize("has_digests", [True, False])
async def test_what_another_worker_has_is_read_and_not_computed(nodes: Nodes, has_digests: bool) -> None:
    handoff = HandoffConfig(digests=has_digests)
    giver, taker = await nodes.start(handoff=handoff), await nodes.start(handoff=handoff)
    await warm(giver)
    computed: list[int] = []
    taker.executor.before_step = lambda plan: computed.append(plan.num_tokens)
    key = await borrow(taker, giver.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(taker, key, PROMPT, NUM_BLOCKS * 4)
    assert sum(computed) == len(PROMPT) - NUM_BLOCKS * 4 + 2
    pulled = taker.client.pulled(key)
    assert isinstance(pulled, Pulled) and pulled.source == giver.worker.me and pulled.busy_s > 0
    assert (pulled.num_blocks, pulled.num_cached_tokens, pulled.num_bytes) == (NUM_BLOCKS, 0, NUM_BLOCKS * 64)
    assert taker.client.load.num_borrowed_tokens == NUM_BLOCKS * 4
    # It is cached like any prefix, by name: the next one needs nobody, and a third worker reads from the second.
    again = await borrow(taker, giver.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(taker, again, PROMPT, NUM_BLOCKS * 4)
    assert taker.client.pulled(again) is None
    third = await nodes.start(handoff=handoff)
    key = await borrow(third, taker.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(third, key, PROMPT, NUM_BLOCKS * 4)
    await settled(giver, taker, third)


async def test_only_what_is_not_here_is_read(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start()
    await warm(giver)
    await warm(taker, [*PROMPT[:21], 7, 7, 7, 7])
    key = await borrow(taker, giver.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(taker, key, PROMPT, NUM_BLOCKS * 4)
    pulled = taker.client.pulled(key)
    assert pulled is not None and (pulled.num_blocks, pulled.num_cached_tokens) == (NUM_BLOCKS - 5, 20)
    await settled(giver, taker)


@pytest.mark.parametrize("num_there", [0, 6])
async def test_a_source_that_has_less_lends_that(nodes: Nodes, num_there: int) -> None:
    """As when it evicted the rest after the router looked."""
    giver, taker = await nodes.start(), await nodes.start()
    await warm(giver, [*PROMPT[: 4 * num_there], 9, 9, 9, 9, 9])
    key = await borrow(taker, giver.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(taker, key, PROMPT, 4 * num_there)
    await settled(giver, taker)


async def test_another_tenant_s_prefix_is_not_found(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start()
    await warm(giver)
    request = replace(new_request(MODEL, PROMPT, 3), cache_salt="other")
    await ends_right(taker, await borrow(taker, giver.worker.me, request), PROMPT, 0)
    await settled(giver, taker)


async def test_a_source_that_is_gone_costs_no_request(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.link.BACKOFF_S", 0.005)
    taker = await nodes.start(handoff=QUICK)
    gone = replace(taker.worker.me, id=type(taker.worker.me.id)("gone"), address="127.0.0.1:9")
    older = replace(taker.worker.me, incarnation=Incarnation(1))
    for first_token, source in enumerate((gone, older)):
        request = new_request(MODEL, [first_token, *PROMPT], 3)
        await ends_right(taker, await borrow(taker, source, request), request.prompt_tokens, 0)
    await settled(taker)


async def test_a_worker_that_is_to_read_from_itself_computes(nodes: Nodes) -> None:
    node = await nodes.start(handoff=QUICK)
    key = await borrow(node, node.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(node, key, PROMPT, 0)
    await settled(node)


async def test_a_read_that_stands_still_is_given_up_while_its_blocks_wait_for_it(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start(handoff=QUICK)
    await warm(giver)
    taker.transport.gate.clear()
    key = await borrow(taker, giver.worker.me, new_request(MODEL, PROMPT, 3))
    other = await taker.client.generate(new_request(MODEL, [7, *PROMPT], 3))
    await taker.client.under_read()
    # Nobody waits behind it.
    await ends_right(taker, other, [7, *PROMPT], 0)
    assert not taker.client.events.get(key)
    await ends_right(taker, key, PROMPT, 0)
    assert (await taker.client.books()).num_reading_blocks == NUM_BLOCKS
    taker.transport.gate.set()
    await settled(giver, taker)


async def test_a_source_that_ends_in_the_middle_of_a_read(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start(handoff=QUICK)
    await warm(giver)
    taker.transport.gate.clear()
    key = await borrow(taker, giver.worker.me, new_request(MODEL, PROMPT, 3))
    await taker.client.under_read()
    await giver.client.__aexit__(None, None, None)
    nodes.nodes.remove(giver)
    await giver.worker.stop()
    await ends_right(taker, key, PROMPT, 0)
    taker.transport.gate.set()
    await settled(taker)


@pytest.mark.parametrize("state", ["asked", "under read"])
async def test_cancel_and_a_newer_attempt_end_the_loan_on_both_sides(nodes: Nodes, state: str) -> None:
    giver, taker = await nodes.start(), await nodes.start()
    await warm(giver)
    gate = Gate(giver.executor, lambda plan: state == "asked" and bool(getattr(plan, "digests", ())))
    if state == "under read":
        taker.transport.gate.clear()
    request = new_request(MODEL, PROMPT, 3)
    key = await borrow(taker, giver.worker.me, request)
    if state == "under read":
        await taker.client.under_read()
    else:
        await asyncio.to_thread(gate.entered.wait)
    newer = Generate(request=request, attempt=2, prefix=prefix_at(giver.worker.me, request))
    await taker.client.submit(newer)
    assert await taker.client.end_of(key) == Cancelled(key)
    if state == "under read":
        await taker.client.under_read()
        await taker.client.cancel(newer.key)
        assert await taker.client.end_of(newer.key) == Cancelled(newer.key)
    gate.open()
    taker.transport.gate.set()
    if state == "asked":
        await ends_right(taker, newer.key, PROMPT, NUM_BLOCKS * 4)
    await settled(giver, taker)


async def test_a_taker_without_room_computes(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start(num_blocks=24)
    await warm(giver)
    pace(taker.executor)
    long = [7, *PROMPT[:50]]
    running = await taker.client.generate(new_request(MODEL, long, 40))
    await taker.client.num_tokens(running, 1)
    key = await borrow(taker, giver.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(taker, key, PROMPT, 0)
    await ends_right(taker, running, long, 0)
    assert taker.client.load.num_borrowed_tokens == 0
    await settled(giver, taker)


async def test_a_prefill_reads_and_offers_what_it_read(nodes: Nodes) -> None:
    source, giver, taker = await nodes.start(), await nodes.start(), await nodes.start()
    await warm(source)
    request = new_request(MODEL, PROMPT, 8)
    handoff = HandoffId("h")
    resume = Resume(request=request, attempt=1, handoff=handoff, source=giver.worker.me)
    prefix = prefix_at(source.worker.me, request)
    prefill = Prefill(request=request, attempt=1, handoff=handoff, prefix=prefix)
    await taker.client.submit(resume)
    await giver.client.submit(prefill)
    assert await giver.client.end_of(prefill.key) == Finished(prefill.key, None, 1, NUM_BLOCKS * 4)
    await ends_right(taker, resume.key, PROMPT, NUM_BLOCKS * 4)
    pulled = taker.client.pulled(resume.key)
    assert pulled is not None and pulled.source is None and pulled.num_blocks == 15
    await settled(source, giver, taker)


async def test_a_worker_that_drains_lends_on(nodes: Nodes) -> None:
    giver, taker = await nodes.start(), await nodes.start()
    await warm(giver)
    running = await giver.client.generate(new_request(MODEL, [3, 4], 400))
    await giver.client.num_tokens(running, 1)
    draining = asyncio.create_task(giver.worker.drain(20.0))
    await giver.client.until(lambda: giver.client.load.draining)
    key = await borrow(taker, giver.worker.me, new_request(MODEL, PROMPT, 3))
    await ends_right(taker, key, PROMPT, NUM_BLOCKS * 4)
    await giver.client.cancel(running)
    await draining
    await settled(giver, taker)


@pytest.mark.parametrize("is_read_meanwhile", [False, True])
async def test_a_link_that_breaks_asks_for_its_loans_anew(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, is_read_meanwhile: bool
) -> None:
    """What was read before there is another link is not given back by name: its lease lapses."""
    lender = replace(QUICK, lease_s=0.4) if is_read_meanwhile else QUICK
    giver, taker = await nodes.start(handoff=lender), await nodes.start()
    await warm(giver)
    taker.transport.gate.clear()
    key = await borrow(taker, giver.worker.me, new_request(MODEL, PROMPT, 3))
    await taker.client.under_read()
    lent_anew = asyncio.Event()
    tell = giver.worker._takers.tell
    monkeypatch.setattr(giver.worker._takers, "tell", lambda effect: (tell(effect), lent_anew.set()))
    giver.worker._takers.close()
    if not is_read_meanwhile:
        await asyncio.wait_for(lent_anew.wait(), PATIENCE_S)
    taker.transport.gate.set()
    await ends_right(taker, key, PROMPT, NUM_BLOCKS * 4)
    await settled(giver, taker)


async def test_one_message_names_no_more_blocks_than_may_be(nodes: Nodes) -> None:
    """As when a link that has broken asks for many long loans anew."""
    node = await nodes.start()
    link = Link(node.worker.me, node.worker._link_context())
    half = Borrow(0, (BlockHash(b"x" * 16),) * (MAX_BORROWED // 2))
    wanted: dict[str, Borrow | None] = {"a": half, "b": half, "c": None, "d": half, "e": None}
    for name, borrow in wanted.items():
        link.follow(HandoffKey(HandoffId(name), 1), borrow)
    messages = [link._next_message(), link._next_message()]
    asked = [[*(b.key.handoff for b in m.borrow), *(key.handoff for key in m.follow)] for m in messages]
    assert asked == [["a", "b", "c"], ["d", "e"]]
    assert max(message.ByteSize() for message in messages) < 2**19
