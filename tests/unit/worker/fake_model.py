"""Provide a model whose KV consists of token ids and positions, so that its tokens reveal every wrong block."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tandem.core.bundle import TokenizerBundle
from tandem.core.events import SampledToken
from tandem.core.ids import BlockId, HostSlot
from tandem.kv.handoff import BlockDigest
from tandem.kv.layout import KVGroup, KVLayout
from tandem.sched.state.step_plan import ScheduledSlice, SliceResult, StepPlan, StepResult
from tandem.worker.model.worker_model import WorkerModel
from tests.memory_pools import memory_pool

BLOCK_SIZE = 4
VOCAB = 1000
MODEL = "fake"
NUM_TRIAL_BLOCKS = 3
_PLANES = 2


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that this model samples after `tokens`; it depends on all of them."""
    digest = hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB


def continuation(prompt: Sequence[int], num: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class FakeExecutor:
    """`pool[block]` holds, per slot, the token id and the position; `memory` the blocks of trials behind it too, and
    `host` what was offloaded. `before_step` is called on the engine's thread. `expert_tokens` are what a model with
    experts would count, by layer and expert."""

    def __init__(self, num_blocks: int, num_host_slots: int = 0) -> None:
        self.host = np.zeros((num_host_slots, _PLANES, BLOCK_SIZE), np.int64)
        self.memory = np.zeros((num_blocks + 2 * NUM_TRIAL_BLOCKS, _PLANES, BLOCK_SIZE), np.int64)
        self.pool = self.memory[:num_blocks]
        for number in range(NUM_TRIAL_BLOCKS):
            self.memory[num_blocks + number] = number + 1
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.expert_tokens: Mapping[int, Sequence[int]] = {}
        self._last: dict[int, int] = {}

    @property
    def layout(self) -> KVLayout:
        return KVLayout(BLOCK_SIZE, (KVGroup(layers=1, heads=1, head_dim=1, dtype="float64"),))

    @property
    def num_blocks(self) -> int:
        return len(self.pool)

    @property
    def num_host_slots(self) -> int:
        return len(self.host)

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def execute(self, plan: StepPlan) -> StepResult:
        self.before_step(plan)
        for block, slot in plan.spills:
            self.host[slot] = self.pool[block]
        for slot, block in plan.fills:
            self.pool[block] = self.host[slot]
        digests = tuple(BlockDigest(block, (self._digest(block, place),)) for block, place in plan.digests)
        return StepResult(plan.number, tuple(self._run(piece) for piece in plan.slices), digests)

    def digest(self, blocks: Sequence[BlockId], logical: Sequence[int]) -> list[tuple[int, ...]]:
        return [(self._digest(block, index),) for block, index in zip(blocks, logical, strict=True)]

    def host_view(self, slot: HostSlot) -> memoryview:
        return memoryview(self.host[slot]).cast("B")

    def digest_host(self, slots: Sequence[HostSlot]) -> list[tuple[int, ...]]:
        return [(_digest(self.host[slot].tobytes()),) for slot in slots]

    def _digest(self, block: int, logical: int) -> int:
        return _digest(self.memory[block].tobytes() + logical.to_bytes(8, "little"))

    def _run(self, piece: ScheduledSlice) -> SliceResult:
        tokens = (self._last[piece.seq],) if piece.chained else piece.tokens
        for position, token in enumerate(tokens, piece.start):
            block, slot = piece.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            self.pool[block, :, slot] = (token, position)
        held = self.pool[list(piece.blocks)].transpose(1, 0, 2).reshape(_PLANES, -1)[:, : piece.stop]
        if not np.array_equal(held[1], np.arange(piece.stop)):
            return SliceResult(piece.seq, error="the KV of another position")
        sampled: tuple[SampledToken, ...] = ()
        if piece.sampling is not None:
            num_top = piece.sampling.params.logprobs or 0
            top = tuple((token, -1.0) for token in range(num_top))
            sampled = (SampledToken(next_token(held[0].tolist()), -1.0 if num_top else None, top),)
            self._last[piece.seq] = sampled[0].id
        index_of = {block: i for i, block in enumerate(piece.blocks)}
        digests = tuple(BlockDigest(b, (self._digest(b, index_of[b]),)) for b in piece.digest_blocks)
        scores = tuple(SampledToken(token, -2.0) for token in piece.scored)
        return SliceResult(piece.seq, sampled, digests, scores=scores)


def fake_model(
    num_blocks: int = 64, fingerprint: str = "f00d", num_host_slots: int = 0
) -> tuple[WorkerModel, FakeExecutor]:
    executor = FakeExecutor(num_blocks, num_host_slots)
    address = executor.pool.ctypes.data
    model = WorkerModel(
        name=MODEL,
        executor=executor,
        pool=memory_pool(
            address, num_blocks, executor.layout, keepalive=executor.memory, num_probe_blocks=NUM_TRIAL_BLOCKS
        ),
        trial_digests=tuple(
            executor.digest([BlockId(num_blocks + number)], [number])[0] for number in range(NUM_TRIAL_BLOCKS)
        ),
        digest=executor.digest,
        fingerprint=fingerprint,
        max_model_len=1000,
        bundle=TokenizerBundle(b"{}", "", "{}", "{}"),
        host=executor,
        expert_tokens=lambda: executor.expert_tokens,
    )
    return model, executor
