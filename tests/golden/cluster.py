"""A cluster of whole engines with real executors in one thread: messages are calls, time is a counter; never a mock.

A request runs on one node (`GenerateJob`), or is prefilled on one and resumed on another in the order of the design. KV
moves through a real transport, driven turn by turn, so that a test may hold it back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tandem.core.config import HandoffConfig
from tandem.core.events import (
    Cancelled,
    Failed,
    Finished,
    JobEvent,
    KVReceived,
    Preempted,
    PromptLogprobs,
    SampledToken,
    Token,
)
from tandem.core.ids import BlockId, HandoffId, Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.request import GenerateJob, Job, PrefillJob, Request, ResumeJob, SamplingParams
from tandem.engine.effects import (
    Effect,
    FollowHandoff,
    JobEnded,
    ReadFiles,
    ReleaseHandoff,
    RenewLeases,
    SendAnnouncement,
    SendHandoffEnded,
    SendRemainderRequest,
    StartRead,
    TearDownPeer,
    WriteFiles,
)
from tandem.engine.engine import Engine
from tandem.engine.ports import Pipeline
from tandem.engine.transfer_messages import ConnectPeer, PeerLost, ReadDone, ReadFailed
from tandem.kv.block_pool import BlockPool
from tandem.runtime.async_executor import AsyncExecutor
from tandem.runtime.model_loader import AnyExecutor
from tandem.sched.state.limits import SchedulerLimits
from tandem.transfer.interface import Transport
from tandem.transfer.memory_pool import MemoryPool, agent_name
from tandem.transfer.nixl_transport import NixlTransport
from tandem.transfer.process_vm_transport import ProcessVmTransport
from tandem.transfer.transfer_engine import TransferEngine
from tandem.worker.engine.driver import SerialPipeline
from tandem.worker.kv.block_files import BlockFiles
from tests.golden.guesses import Method, speculation
from tests.golden.multi_rank_node import MultiRankCarrier

if TYPE_CHECKING:
    from tests.golden.models import Reference

TransportKind = Literal["local", "nixl"]
_lives = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What the output may not depend on. `chunk=None` switches chunked prefill off; `on_device` takes the executor of
    GPUs, whose steps overlap with plan_depth 2, on the CPU."""

    chunk: int | None = 64
    block_size: int = 16
    plan_depth: int = 1
    remote: bool = False
    transport: TransportKind = "local"
    prefix_hit: bool = False
    company: bool = False
    preempt: bool = False
    speculation: Method = "off"
    on_device: bool = False

    def __str__(self) -> str:
        on = [name for name in ("remote", "prefix_hit", "company", "preempt", "on_device") if getattr(self, name)]
        kind = f"-{self.transport}" if self.remote else ""
        kind += f"-{self.speculation}" if self.speculation != "off" else ""
        return f"chunk{self.chunk}-block{self.block_size}-depth{self.plan_depth}{kind}" + "".join(f"-{x}" for x in on)


def can_guess(plan_depth: int, remote: bool) -> bool:
    """With two plans open a decode is planned before its last token is known, unless it begins with KV from elsewhere;
    and nothing is guessed after a token that is not known."""
    return plan_depth == 1 or remote


def executors_for(
    reference: Reference,
    knobs: Knobs,
    num_blocks: int,
    num_last_blocks: int | None = None,
    num_nodes: int | None = None,
    **options: Any,
) -> list[AnyExecutor]:
    """Return an executor for each node, of which the last one has `num_last_blocks` where those are given."""
    count = 1 + knobs.remote if num_nodes is None else num_nodes
    sizes = [num_blocks] * (count - 1) + [num_blocks if num_last_blocks is None else num_last_blocks]
    return [
        reference.executor(block_size=knobs.block_size, num_blocks=size, on_device=knobs.on_device, **options)
        for size in sizes
    ]


def executors_with_room(
    reference: Reference, knobs: Knobs, prompts: Sequence[Sequence[int]], num_outputs: int, **options: Any
) -> list[AnyExecutor]:
    """Return executors with room for twice the prompts and outputs; with `preempt` the last one lacks a block."""
    needed = sum(-(-(len(prompt) + num_outputs) // knobs.block_size) for prompt in prompts)
    return executors_for(reference, knobs, 2 * needed, needed - 1 if knobs.preempt else None, **options)


class Ticks:
    """A clock that only tests move."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


class Node:
    """One worker without its threads and sockets, whose KV moves as if several ranks held it where it has many."""

    def __init__(
        self,
        name: str,
        executor: AnyExecutor,
        knobs: Knobs,
        clock: Ticks,
        answers: Sequence[Sequence[int]],
        num_ranks: int = 1,
        *,
        keeps_files: bool = False,
    ) -> None:
        self.ref = WorkerRef(WorkerId(name), Incarnation(next(_lives)), f"{name}:0")
        self.executor = executor
        limits = SchedulerLimits(
            max_num_batched_tokens=knobs.chunk or 64,
            max_num_seqs=64,
            max_model_len=executor.max_model_len,
            enable_chunked_prefill=knobs.chunk is not None,
        )
        pool = BlockPool(
            executor.num_blocks,
            executor.layout.block_size,
            num_host_slots=executor.num_host_slots,
            records_facts=True,
            keeps_files=keeps_files,
        )
        guesses = speculation(knobs.speculation, answers)
        self.engine = Engine(
            pool,
            limits,
            HandoffConfig(),
            "golden",
            block_bytes=executor.layout.block_bytes,
            plan_depth=knobs.plan_depth,
            speculation=guesses,
        )
        self.pipeline: Pipeline = executor if isinstance(executor, AsyncExecutor) else SerialPipeline(executor)
        self.num_open = 0
        self.num_spilled = self.num_filled = self.num_from_files = 0
        self.transport: Transport | MultiRankCarrier
        self.carrier: TransferEngine | MultiRankCarrier
        if num_ranks > 1:
            self.transport = self.carrier = MultiRankCarrier(
                knobs.transport, self.ref, executor.cache, clock, num_ranks
            )
            return
        memory = MemoryPool(executor.cache.region, executor.layout, keepalive=executor)
        agent = agent_name(self.ref.id, self.ref.incarnation)
        self.transport = (ProcessVmTransport if knobs.transport == "local" else NixlTransport)(memory, agent)
        self.carrier = TransferEngine(self.transport, executor.cache.digest, clock, 1 << 20)

    def share(self, blocks: Sequence[BlockId]) -> None:
        """Blocks that are announced are where others read them."""
        if isinstance(self.transport, MultiRankCarrier):
            self.transport.lay_out(blocks)


@dataclass(slots=True)
class Outcome:
    """What a client of one request sees, and where each token came from."""

    tokens: list[SampledToken] = field(default_factory=list)
    scores: list[SampledToken] = field(default_factory=list)
    end: Finished | Failed | Cancelled | None = None
    pulled: KVReceived | None = None
    first_from: str = ""

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class Cluster(AbstractContextManager["Cluster"]):
    """`prefill` and `decode` nodes, or one that is both. `hold` keeps KV from moving. `answers`: see `Spoiler`.
    `num_ranks` of each node. `files`: a directory of block files, which all nodes use; None: they keep none."""

    def __init__(
        self,
        executors: Sequence[AnyExecutor],
        knobs: Knobs,
        answers: Sequence[Sequence[int]] = (),
        num_ranks: Sequence[int] = (1, 1, 1),
        files: Path | None = None,
    ) -> None:
        self.knobs = knobs
        self.clock = Ticks()
        layout = executors[0].layout
        self.files = BlockFiles(files or Path(), layout.block_bytes, layout.group.heads, 1 << 30)
        self.nodes = [
            Node(name, x, knobs, self.clock, answers, ranks, keeps_files=files is not None)
            for name, x, ranks in zip("pdx", executors, num_ranks, strict=False)
        ]
        self.producer, self.consumer = self.nodes[0], self.nodes[-1]
        self.hold = False
        self.outcomes: dict[RequestId, Outcome] = {}
        self._by_ref = {node.ref: node for node in self.nodes}
        self._ids = itertools.count()
        if files is not None:
            for node in self.nodes:
                node.engine.files_changed(*self.files.scan())
        if len(self.nodes) > 1:
            self.consumer.carrier.accept(ConnectPeer(self.producer.transport.describe(self.producer.ref)))

    def __exit__(self, *_: object) -> None:
        for node in reversed(self.nodes):
            node.carrier.close()

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, prompt_logprobs: int | None = None) -> RequestId:
        name = RequestId(f"r{next(self._ids)}")
        request = Request(
            id=name, model="m", prompt_tokens=tuple(prompt), sampling=sampling, prompt_logprobs=prompt_logprobs
        )
        self.outcomes[name] = Outcome()
        self.place_request(request)
        return name

    def place_request(self, request: Request, **choices: Any) -> None:
        """Place it on the only node, or its prefill on one node and what resumes it on the other."""
        if not self.knobs.remote:
            self.place(self.consumer, GenerateJob(request=request, attempt=1, **choices))
            return
        handoff, source = HandoffId(f"h-{request.id}"), self.producer.ref
        self.place(self.consumer, ResumeJob(request=request, attempt=1, handoff=handoff, source=source, **choices))
        self.place(self.producer, PrefillJob(request=request, attempt=1, handoff=handoff, **choices))

    def place(self, node: Node, job: Job) -> None:
        self._carry_out(node, node.engine.submit(job, self.clock.now()))

    def run_requests(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, prompt_logprobs: int | None = None
    ) -> list[Outcome]:
        """What clients see of all prompts, which run to their end; checks that what the knobs ask for did happen."""
        knobs = self.knobs
        if knobs.prefix_hit:
            for prompt in prompts:
                self.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0))
            self.run()
        names = []
        for prompt in prompts:
            names.append(self.submit(prompt, sampling, prompt_logprobs))
            if not knobs.company:
                self.run()
        self.run()
        outcomes = [self.outcomes[name] for name in names]
        assert all(isinstance(o.end, Finished) and len(o.ids) == sampling.max_tokens for o in outcomes)
        if knobs.remote:
            assert all(o.pulled is not None and o.first_from == "p" for o in outcomes)
        # A sequence that guesses may have ended before one whose KV came later needs its room.
        if knobs.preempt and knobs.company and (knobs.speculation == "off" or not knobs.remote):
            assert self.consumer.engine.num_preempted > 0, f"nobody gave way under {knobs}"
        if knobs.speculation != "off" and can_guess(knobs.plan_depth, knobs.remote):
            load = self.consumer.engine.load()
            assert 0 < load.num_accepted_tokens < load.num_drafted_tokens, f"{load} under {knobs}"
        return outcomes

    def cancel(self, name: RequestId) -> None:
        for node in self.nodes:
            self._carry_out(node, node.engine.cancel(JobKey(name, 1), self.clock.now()))

    def step(self) -> bool:
        """One beat of every node; False when nothing happened anywhere."""
        self.clock.time += 0.01
        moved = False
        for node in self.nodes:
            self._carry_out(node, node.engine.tick(self.clock.now()))
            moved |= self._compute(node)
            if not self.hold:
                moved |= self._move(node)
            node.engine.check()
        return moved

    def run(self, max_steps: int = 20_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.step() and all(node.engine.is_idle for node in self.nodes):
                return
        raise AssertionError(f"still busy after {max_steps} steps: {[node.engine for node in self.nodes]}")

    def _compute(self, node: Node) -> bool:
        """Open plans up to the depth, then run and finish the oldest."""
        while True:
            plan, effects = node.engine.begin(self.clock.now())
            self._carry_out(node, effects)
            if plan is None:
                break
            node.pipeline.launch(plan)
            node.num_open += 1
            node.num_spilled += len(plan.spills)
            node.num_filled += len(plan.fills)
        if not node.num_open:
            return False
        result = node.pipeline.collect()
        node.num_open -= 1
        self._carry_out(node, node.engine.finish(result, self.clock.now()))
        return True

    def _move(self, node: Node) -> bool:
        """Turn the transport until every read that was ordered has ended."""
        events = []
        while True:
            events += node.carrier.turn()
            if node.carrier.is_drained and not node.carrier.has_ready_work:
                break
            for other in self.nodes:
                other.transport.progress()
        for event in events:
            now = self.clock.now()
            match event:
                case ReadDone():
                    self._carry_out(node, node.engine.read_done(event.id, now))
                case ReadFailed():
                    effects = node.engine.read_failed(event.id, event.reason, drained=event.drained, now=now)
                    self._carry_out(node, effects)
                case PeerLost():
                    raise AssertionError(event.reason)
        return bool(events)

    def _carry_out(self, node: Node, effects: Iterable[Effect]) -> None:
        for effect in effects:
            now = self.clock.now()
            match effect:
                case event if isinstance(event, JobEvent):
                    self._take(node, event)
                case SendAnnouncement(consumer, message):
                    node.share([offered.block for offered in message.blocks])
                    self._carry_out(self._by_ref[consumer], self._by_ref[consumer].engine.announced(message, now))
                case SendHandoffEnded(consumer, key, kind, text):
                    self._carry_out(
                        self._by_ref[consumer], self._by_ref[consumer].engine.handoff_ended(key, kind, text, now)
                    )
                case FollowHandoff() | SendRemainderRequest() | ReleaseHandoff() | RenewLeases():
                    self._send_to_source(node, effect)
                case StartRead():
                    node.carrier.accept(effect)
                case ReadFiles() | WriteFiles():
                    self._use_files(node, effect)
                case JobEnded():
                    pass
                case TearDownPeer():
                    raise AssertionError("a read did not end")

    def _send_to_source(
        self, node: Node, effect: FollowHandoff | SendRemainderRequest | ReleaseHandoff | RenewLeases
    ) -> None:
        producer, now = self._by_ref[effect.source], self.clock.now()
        match effect:
            case FollowHandoff(_, key, prefix_request):
                self._carry_out(producer, producer.engine.follow(key, node.ref, now, prefix_request))
                node.engine.renewed((key,), now, 10.0)
            case SendRemainderRequest(_, key, num_known):
                self._carry_out(producer, producer.engine.request_remainder(key, num_known, now))
            case ReleaseHandoff(_, key, is_taken):
                self._carry_out(producer, producer.engine.release(key, now, is_taken=is_taken))
            case RenewLeases(_, keys):
                self._carry_out(producer, producer.engine.renew(keys, node.ref, now))
                node.engine.renewed(keys, now, 10.0)

    def _use_files(self, node: Node, effect: ReadFiles | WriteFiles) -> None:
        """Read and write files at once, which both nodes share."""
        cache, now = node.executor.cache, self.clock.now()
        if isinstance(effect, WriteFiles):
            for slot, block_hash in effect.writes:
                (digests,) = cache.digest_host([slot])
                changes = self.files.write(block_hash, cache.host_view(slot), digests)
                for each in self.nodes:
                    each.engine.files_changed(*changes)
                self._carry_out(node, node.engine.file_written(slot, block_hash, now, is_done=True))
            return
        for block_hash, slot in zip(effect.hashes, effect.slots, strict=True):
            assert self.files.read(block_hash, cache.host_view(slot)) == cache.digest_host([slot])[0]
        node.num_from_files += len(effect.hashes)
        self._carry_out(node, node.engine.files_read(effect.read, len(effect.hashes), 0.0, now, is_over=True))

    def _take(self, node: Node, event: JobEvent) -> None:
        """As a gateway would: tokens once, in order of index; the end is the one of the node that decodes."""
        outcome = self.outcomes[event.key.request]
        match event:
            case Token(_, index, token):
                assert index <= len(outcome.tokens), "a token is missing"
                if index < len(outcome.tokens):
                    assert outcome.tokens[index] == token, "two workers disagree about a token"
                    return
                if index == 0:
                    outcome.first_from = node.ref.id
                outcome.tokens.append(token)
            case PromptLogprobs(_, first_index, scores):
                assert not outcome.tokens and node is self.producer, (
                    "scores come first, from where the prompt is computed"
                )
                assert first_index <= 1 + len(outcome.scores), "a score is missing"
                outcome.scores[first_index - 1 :] = scores
            case KVReceived() | Preempted():
                outcome.pulled = event
            case Finished(_, None, _, _):
                pass
            case _ if node is self.consumer or (isinstance(event, Finished) and outcome.end is None):
                assert outcome.end is None or self.knobs.remote, "two ends"
                if outcome.end is None:
                    outcome.end = event
                if self.knobs.remote and node is not self.consumer:
                    self.cancel(event.key.request)
