"""Measure what the prefix index costs a gateway without Redis: its table, alternatives to the table, and hashing."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from loadtest.common.stats import percentile
from tandem.core.ids import BlockHash, Incarnation, RequestId, WorkerId, WorkerRef
from tandem.core.request import Request, SamplingParams
from tandem.gateway.prefix.prefix_index_client import hash_prompt_blocks
from tandem.kv.compact_block_set import CompactBlockSet
from tandem.kv.hashing import chain_hashes, root_hash
from tandem.kv.kv_event_codec import DEVICE, short_hash
from tandem.routing.prefix_index import PrefixTable

NUM_WORKERS = 64
NUM_BLOCKS = 1_000_000
PROMPT_BLOCKS = 8192
BLOCK_SIZE = 16
LOOKUPS = 2000
ROUNDS = 20


class Holdings(NamedTuple):
    """A prompt and the blocks that each worker holds: some of the prompt's leading blocks, and other blocks.

    `prompt`: hashes of its blocks. `words`: for each worker the words of its blocks.
    """

    prompt: list[BlockHash]
    words: list[array[int]]

    @classmethod
    def sample(cls, seed: int, num_blocks: int, num_lengths: int) -> Holdings:
        """Choose at random which blocks each of 64 workers holds, `num_blocks` in all.

        `num_lengths`: how many different lengths of the prompt's beginning the workers hold.
        """
        rng = random.Random(seed)
        prompt = [BlockHash(rng.randbytes(16)) for _ in range(PROMPT_BLOCKS)]
        each = num_blocks // NUM_WORKERS
        lengths = [rng.randint(0, min(each, PROMPT_BLOCKS)) for _ in range(num_lengths)]
        words = []
        for worker in range(NUM_WORKERS):
            mine = prompt[: lengths[worker % num_lengths]]
            mine += [BlockHash(rng.randbytes(16)) for _ in range(each - len(mine))]
            rng.shuffle(mine)
            words.append(array("Q", (short_hash(block) | DEVICE for block in mine)))
        return cls(prompt, words)

    def table(self) -> PrefixTable:
        table = PrefixTable()
        for number, words in enumerate(self.words):
            held = CompactBlockSet(len(words))
            held.write(words)
            table.load(worker(number), held)
        return table


def worker(number: int) -> WorkerRef:
    return WorkerRef(WorkerId(f"tandem-decode-{number:05d}"), Incarnation(1_795 * 10**15), "10.0.0.1:50051")


def lookups(seed: int, num_blocks: int) -> Iterator[str]:
    """Yield Markdown rows with the processor time of one lookup of a prompt of 8,192 blocks."""
    yield "| parts of the prompt that workers hold | p50 us | p99 us |"
    yield "|---|---:|---:|"
    for what, num_lengths in (("all the same", 1), ("4 different ones", 4), ("each another", NUM_WORKERS)):
        holdings = Holdings.sample(seed, num_blocks, num_lengths)
        yield _lookup(what, holdings.table(), holdings.prompt)
    others = Holdings.sample(seed, num_blocks, 1).table()
    yield _lookup("none", others, Holdings.sample(seed + 1, 0, 1).prompt)


def _lookup(what: str, table: PrefixTable, prompt: list[BlockHash]) -> str:
    took = list(_times(LOOKUPS, lambda: table.match(prompt)))
    return f"| {what} | {percentile(took, 0.5) * 1e6:,.0f} | {percentile(took, 0.99) * 1e6:,.0f} |"


def forms(seed: int, num_blocks: int) -> Iterator[str]:
    """Yield Markdown rows with memory and lookup time of one worker's table, and of plain Python sets that do the
    same."""
    words = Holdings.sample(seed, num_blocks, 1).words[0]
    names = [word - DEVICE for word in words]
    held = CompactBlockSet()
    held.write(words)
    integers = len(words) * sys.getsizeof(1 << 62)
    plain = {"set of integers": set(names), "dict of integers": dict.fromkeys(names, DEVICE)}
    yield f"| form, for {len(words):,} blocks of one worker | bytes per block | one look, ns |"
    yield "|---|---:|---:|"
    for name, form in plain.items():
        look_s = _one(names, lambda one, form=form: one in form)  # type: ignore[misc]
        yield f"| {name} | {(sys.getsizeof(form) + integers) / len(words):.0f} | {look_s * 1e9:.0f} |"
    look_s = _one(names, held.tier)
    yield f"| array of words | {held.num_bytes / len(words):.0f} | {look_s * 1e9:.0f} |"


async def hashing(num_tokens: int) -> list[str]:
    """Return Markdown rows with the time to hash a prompt's blocks, and with how long that keeps the event loop from
    other tasks."""
    tokens = tuple(i * 7919 % 32_000 for i in range(num_tokens))
    root = root_hash("model", BLOCK_SIZE, "")
    pool = ThreadPoolExecutor(1)
    loop = asyncio.get_running_loop()

    async def whole() -> None:
        chain_hashes(root, tokens, BLOCK_SIZE)

    async def in_thread() -> None:
        await loop.run_in_executor(pool, chain_hashes, root, tokens, BLOCK_SIZE)

    async def in_slices() -> None:
        sampling = SamplingParams(max_tokens=1)
        request = Request(id=RequestId("r"), model="m", prompt_tokens=tokens, sampling=sampling)
        await hash_prompt_blocks(request, "model", BLOCK_SIZE)

    rows = [
        f"| hashing of {num_tokens:,} tokens | ms, p50 | event loop held up, ms, p50 of the longest |",
        "|---|---:|---:|",
    ]
    for name, hash_prompt in (
        ("at once", whole),
        ("in a thread", in_thread),
        ("in slices (what the gateway does)", in_slices),
    ):
        took_s, held_s = await _held_up(hash_prompt)
        rows.append(f"| {name} | {took_s * 1e3:.1f} | {held_s * 1e3:.2f} |")
    pool.shutdown()
    return rows


async def _held_up(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Return medians in seconds: the duration of `work`, and the longest time between two turns of the event loop
    during it."""
    took, longest = [], []
    for _ in range(ROUNDS):
        gaps: list[float] = []
        ticker = asyncio.create_task(_tick(gaps))
        await asyncio.sleep(0.01)
        gaps.clear()
        began = time.perf_counter()
        await work()
        took.append(time.perf_counter() - began)
        await asyncio.sleep(0.01)
        ticker.cancel()
        longest.append(max(gaps))
    return percentile(took, 0.5), percentile(longest, 0.5)


async def _tick(gaps: list[float]) -> None:
    last = time.perf_counter()
    while True:
        await asyncio.sleep(0)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now


def _times(count: int, call: Callable[[], object]) -> Iterator[float]:
    """Yield processor seconds, which exclude whatever else runs on this machine."""
    for _ in range(count):
        began = time.thread_time()
        call()
        yield time.thread_time() - began


def _one(names: Sequence[int], look: Callable[[int], object]) -> float:
    """Return the seconds of one lookup, calls included."""
    began = time.perf_counter()
    for name in names:
        look(name)
    return (time.perf_counter() - began) / len(names)
