"""Simulated workers read prefixes from each other as real ones do: in the time that the link takes, and with the same
events however far a worker looks ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import Bytes, Config, EngineConfig, WorkerConfig
from tandem.core.events import Finished, JobEvent, KVReceived, Token
from tandem.core.ids import HandoffId, RequestId
from tandem.core.request import GenerateJob, RemotePrefix, Request, SamplingParams
from tandem.core.worker_load import WorkerLoad
from tandem.sim.cluster.fabric import Fabric
from tandem.sim.cluster.network import Network
from tandem.sim.cluster.prefix_index import SimIndex
from tandem.sim.cluster.worker import SimWorker, StepRun
from tandem.sim.cost.model_shapes import SHAPES
from tandem.sim.kernel.event_queue import Actor, SimEventQueue, combined
from tests.effort import effort
from tests.simulation.clusters import LAPTOP, slow_spec

LATENCY_S, READ_LATENCY_S = 2e-4, 5e-5


@dataclass(eq=False)
class Ears:
    """A `Listener` that records what it receives, with the time."""

    now: Callable[[], float]
    party: Actor = field(default_factory=lambda: Actor(0))
    events: list[tuple[float, JobEvent]] = field(default_factory=list)

    def streamed(self, worker: object, stretch: StepRun) -> None:
        pass

    def on_worker_events(self, worker: object, events: Sequence[JobEvent], load: WorkerLoad | None) -> None:
        self.events += [(self.now(), event) for event in events]


class Rig:
    """Two workers, a network between them, and an actor that submits requests."""

    def __init__(
        self,
        bandwidth: float = 1e9,
        max_run: int = 64,
        num_blocks: int = 2000,
        num_host_blocks: int = 0,
        num_files: int = 0,
    ) -> None:
        self.agenda = SimEventQueue()
        fabric = Fabric(self.agenda, READ_LATENCY_S)
        self.network = Network(self.agenda, fabric, LATENCY_S, SimIndex(self.agenda, 0.05))
        self.ears = Ears(lambda: self.agenda.now)
        block_bytes = SHAPES["smollm2-135m"].layout(16).block_bytes
        config = Config(
            engine=EngineConfig(
                host_cache_memory=Bytes(num_host_blocks * block_bytes),
                file_cache_path="shared" if num_files else "",
                file_cache_size=Bytes(num_files * block_bytes),
            ),
            worker=WorkerConfig(queue_horizon_ms=1e6),  # no gateway in which jobs could wait
        )
        spec = slow_spec(bandwidth=bandwidth, max_run=max_run, num_blocks=num_blocks, config=config, host_bandwidth=1e9)
        self.workers = [SimWorker(self.agenda, spec, f"w{i}", self.network, 0, Actor(1 + i)) for i in range(2)]
        self.network.attach(self.workers, [self.ears])

    def submit(self, at_s: float, worker: int, name: str, num_prompt: int, max_tokens: int, source: int = -1) -> None:
        """Prompts of one length are the same; `source` has it."""
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(
            id=RequestId(name), model="m", prompt_tokens=tuple(range(num_prompt, 0, -1)), sampling=sampling
        )
        prefix = RemotePrefix(handoff=HandoffId(name), source=self.workers[source].ref, num_blocks=num_prompt // 16)
        job = GenerateJob(request=request, attempt=1, prefix=prefix if source >= 0 else None)
        consumer = self.workers[worker]
        self.agenda.at(at_s, name, lambda: consumer.submit(job, lambda *_: None), by=self.ears.party, to=consumer.party)

    def run(self) -> None:
        self.agenda.run()
        for worker in self.workers:
            worker.engine.check()
            books = worker.engine.books()
            assert worker.is_idle and books.num_free_blocks == books.num_blocks, books

    def first(self, name: str, kind: type[JobEvent]) -> tuple[float, JobEvent]:
        return next((at, e) for at, e in self.ears.events if type(e) is kind and e.key.request == name)

    @property
    def digest(self) -> str:
        return combined(worker.party.log for worker in self.workers)


def test_reading_takes_what_the_link_takes_and_then_there_is_little_to_compute() -> None:
    rig = Rig()
    rig.submit(0.0, 0, "a", 1605, 1)
    rig.submit(5.0, 1, "b", 1605, 1, source=0)
    rig.run()
    num_bytes = 100 * rig.workers[1].spec.layout.block_bytes
    read_s = num_bytes / 1e9
    step_s = LAPTOP.base_s + LAPTOP.chunk_s(1600, 5)
    _, pulled = rig.first("b", KVReceived)
    assert isinstance(pulled, KVReceived) and pulled.source == rig.workers[0].ref and pulled.num_bytes == num_bytes
    at, end = rig.first("b", Finished)
    assert isinstance(end, Finished) and end.num_cached_tokens == 1600
    assert at == pytest.approx(5.0 + read_s + step_s, abs=4 * LATENCY_S + 2 * READ_LATENCY_S)
    assert rig.workers[1].engine.load().num_remote_hit_tokens == 1600
    assert rig.workers[0].engine.load().num_remote_hit_tokens == 0


@pytest.mark.parametrize(("num_files", "expected"), [(1000, 1600), (100, 0)])
def test_the_other_worker_finds_files_after_a_while(num_files: int, expected: int) -> None:
    """Prompts that push each other out of a small pool and host memory; 100 files are those of the last prompt only."""
    rig = Rig(num_blocks=110, num_host_blocks=110, num_files=num_files)
    for i, (at_s, length) in enumerate([(0.0, 1605), (10.0, 1505), (20.0, 1405), (30.0, 1305)]):
        rig.submit(at_s, 0, f"a{i}", length, 1)
    rig.submit(100.0, 1, "b", 1605, 1)
    rig.run()
    _, end = rig.first("b", Finished)
    assert isinstance(end, Finished) and end.num_cached_tokens == expected
    assert rig.workers[1].engine.books().num_file_hit_tokens == expected


def test_a_link_that_is_slower_than_computing_costs_no_more_than_as_much_again() -> None:
    rig = Rig(bandwidth=1e6)
    rig.submit(0.0, 0, "a", 805, 1)
    rig.submit(5.0, 1, "b", 805, 1, source=0)
    rig.run()
    (first, one), (second, other) = rig.first("a", Finished), rig.first("b", Finished)
    assert isinstance(one, Finished) and isinstance(other, Finished) and other.num_cached_tokens == 0
    assert first < second - 5.0 < 2 * first + 0.1


def busy(max_run: int, num_blocks: int) -> Rig:
    """Both decode for long, and read from each other meanwhile; a prefix of 500 is not there at all."""
    rig = Rig(max_run=max_run, bandwidth=2e8, num_blocks=num_blocks)
    rig.submit(0.0, 0, "a", 1605, 900)
    rig.submit(0.0, 1, "b", 805, 700)
    for i in range(12):
        rig.submit(6.0 + 0.37 * i, i % 2, f"c{i}", (805, 1605, 500)[i % 3], 30, source=1 - i % 2)
    rig.run()
    return rig


@pytest.mark.parametrize("num_blocks", [2000, 260])
def test_looking_ahead_changes_nothing(num_blocks: int) -> None:
    one, other = busy(1, num_blocks), busy(64, num_blocks)
    assert one.digest == other.digest
    events = [[(at, e) for at, e in rig.ears.events if not isinstance(e, Token)] for rig in (one, other)]
    assert events[0] == events[1] and len([e for _, e in events[0] if isinstance(e, Finished)]) == 14
    assert sum(worker.engine.load().num_remote_hit_tokens for worker in one.workers) > 1000
    assert one.agenda.num_run > 1.5 * other.agenda.num_run, "it did look ahead"


@effort(50)
@given(
    bandwidth=st.sampled_from([1e6, 1e8, 1e10]),
    num_blocks=st.sampled_from([120, 300]),
    num_host_blocks=st.sampled_from([0, 50, 500]),
    num_files=st.sampled_from([0, 0, 100, 1000]),
    jobs=st.lists(
        st.tuples(
            st.floats(0.0, 20.0),
            st.integers(0, 1),
            st.sampled_from([300, 805, 1605]),
            st.integers(1, 60),
            st.sampled_from([-1, 0, 1]),
        ),
        min_size=2,
        max_size=16,
    ),
)
def test_whatever_is_fetched_all_end_and_looking_ahead_changes_nothing(
    bandwidth: float,
    num_blocks: int,
    num_host_blocks: int,
    num_files: int,
    jobs: list[tuple[float, int, int, int, int]],
) -> None:
    """Also from a worker that has nothing, or from itself."""
    seen = []
    for max_run in (1, 64):
        rig = Rig(bandwidth, max_run, num_blocks, num_host_blocks, num_files)
        for i, (at_s, worker, num_prompt, max_tokens, source) in enumerate(jobs):
            rig.submit(at_s, worker, f"j{i}", num_prompt, max_tokens, source)
        rig.run()
        ends = {e.key.request: (at, e) for at, e in rig.ears.events if isinstance(e, Finished)}
        assert len(ends) == len(jobs)
        seen.append((rig.digest, ends, [worker.engine.load() for worker in rig.workers]))
    assert seen[0] == seen[1]
