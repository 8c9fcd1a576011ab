"""Test the upgrade of a cluster by a second one: real planner and policies, around simulated Serve clusters.

The size of the fleet must not feed back into itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.core.config import PlannerConfig
from tandem.core.ids import Incarnation, PlannerId, ServeId, WorkerId, WorkerRef
from tandem.core.slo import Slo
from tandem.core.step_cost import StepCost
from tandem.core.worker_load import WorkerLoad
from tandem.planner import serve_policy
from tandem.planner.actuator import ActuatorFailed
from tandem.planner.pool_targets import compute_targets, most_of
from tandem.planner.serve_actuator import ServeActuator
from tandem.planner.serve_policy import ReplicaPolicy
from tandem.scaling.cluster_state import Demand, WorkerCapacity
from tandem.scaling.demand_totals import QueueBacklog
from tandem.scaling.scaler import Scaler
from tandem.scaling.worker_state import WorkerState, build_observation
from tandem.stores.replica_targets import DEPLOYED_TTL_S, TTL_S, TargetRecord

CONFIG = PlannerConfig(mode="act", min_prefill=1, max_prefill=6, min_decode=2, max_decode=4)
MOST = {"prefill": CONFIG.max_prefill, "decode": CONFIG.max_decode}
STEP_S = 5.0
START_STEPS = 3
"""From where Serve means to have a worker until it is registered."""
DEMAND = Demand(
    seconds=STEP_S, num_requests=10, num_input_tokens=10_000, num_cached_tokens=0, num_output_tokens=1500,
    num_prefill_pairs=5_000_000, num_served=10, num_gaps=1500,
)  # fmt: skip
COST = StepCost(base_s=0.01, prefill_token_s=1e-4, decode_seq_s=1e-4, decode_context_s=1e-9, prefill_pair_s=0.0)
ABLE = WorkerCapacity(cost=COST, num_blocks=20_000, block_size=64, max_num_seqs=256, max_num_batched_tokens=8192)


@dataclass
class Board:
    """Targets in a Redis whose time is `now`."""

    now: float = 0.0
    published: tuple[float, TargetRecord] | None = None
    serves: dict[tuple[str, ServeId], tuple[float, int]] = field(default_factory=dict)

    async def publish(self, record: TargetRecord) -> PlannerId:
        self.published = self.now, record
        return record.planner

    async def read(self, model: str) -> TargetRecord | None:
        return self.published[1] if self.published is not None and self.now - self.published[0] < TTL_S else None

    async def publish_deployed(self, model: str, role: str, serve: ServeId, number: int) -> None:
        self.serves[role, serve] = self.now, number

    async def deployed(self, model: str) -> dict[str, dict[ServeId, int]]:
        found: dict[str, dict[ServeId, int]] = {}
        for (role, serve), (at, number) in self.serves.items():
            if self.now - at < DEPLOYED_TTL_S:
                found.setdefault(role, {})[serve] = number
        return found


class Cluster:
    """Serve in a RayCluster: it intends to run `means` workers, and has as many some steps later."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = ServeId(name)
        # Their own threads ask in vain: the test asks for them.
        (directory / "config.yaml").write_text(f"redis: {{url: unix://{directory}/none.sock}}\n")
        self._policies = {role: ReplicaPolicy(role, str(directory / "config.yaml"), "m") for role in MOST}
        self.means = dict.fromkeys(MOST, 2)
        self._past = [dict.fromkeys(MOST, 0)] * START_STEPS

    def __len__(self) -> int:
        return sum(self.means.values())

    async def step(self, board: Any) -> None:
        self._past = [*self._past[1:], dict(self.means)]
        for role, policy in self._policies.items():
            known = policy._known
            number = await serve_policy._exchange_target(board, "m", role, known.deployed)
            known.found = serve_policy._Found(number, policy._clock.now())
            context = SimpleNamespace(
                target_num_replicas=self.means[role],
                capacity_adjusted_min_replicas=1,
                capacity_adjusted_max_replicas=MOST[role],
            )
            self.means[role] = policy(context)[0]

    def workers(self) -> list[WorkerState]:
        there = {role: min(number, self.means[role]) for role, number in self._past[0].items()}
        return [
            WorkerState(
                ref=WorkerRef(WorkerId(f"{self.name}-{role}-{number}"), Incarnation(1), "h:1"),
                model="m", pool=role, role=role, load=WorkerLoad(), capability=ABLE,
            )
            for role in there for number in range(there[role])
        ]  # fmt: skip


@dataclass
class Fleet:
    """One planner, and clusters that share its Redis."""

    clusters: list[Cluster]
    monkeypatch: pytest.MonkeyPatch
    board: Board = field(default_factory=Board)
    held: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        targets: Any = self.board
        unused: Any = None
        self._actuator = ServeActuator(PlannerId("p"), targets, unused, {})
        self._scaler = Scaler(CONFIG, Slo(1.5, 0.05))

    async def run(self, seconds: float) -> list[list[int]]:
        """Run some steps; return how many workers each cluster intended to run at each step."""
        sizes: list[list[int]] = []
        for _ in range(round(seconds / STEP_S)):
            self.board.now += STEP_S
            for cluster in self.clusters:
                self.monkeypatch.setattr(serve_policy, "serve_name", lambda me=cluster.name: me)
                await cluster.step(self.board)
            await self._plan([worker for cluster in self.clusters for worker in cluster.workers()])
            sizes.append([len(cluster) for cluster in self.clusters])
        return sizes

    async def _plan(self, workers: list[WorkerState]) -> None:
        try:
            starting = await self._actuator.starting("m", workers)
        except ActuatorFailed as reason:
            self.held.append(str(reason))
            return
        decision = self._scaler.decide(build_observation(self.board.now, DEMAND, QueueBacklog(), workers, starting))
        assert not decision.changes
        pool_targets = compute_targets(decision, workers, starting, most_of(CONFIG))
        await self._actuator.carry_out("m", pool_targets, decision.reasons, workers)


@pytest.mark.slow
async def test_an_upgrade_to_a_second_cluster_leaves_both_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demand of the whole hour needs one prefill worker and one decode worker."""
    old, new = (Cluster(name, tmp_path) for name in ("old-head", "new-head"))
    fleet = Fleet([old], monkeypatch)
    assert (await fleet.run(900))[-1] == [3] and not fleet.held
    fleet.clusters.append(new)
    both = await fleet.run(300)
    assert both[-1] == [3, 4] and all(size <= [3, 4] for size in both), both
    assert "2 Serves have" in fleet.held[-1] and "new-head, old-head" in fleet.held[-1]
    fleet.clusters.remove(old)
    fleet.held.clear()
    after = await fleet.run(900)
    assert 0 < len(fleet.held) <= DEPLOYED_TTL_S / STEP_S, "until the old one has been silent for long enough"
    assert all(size <= [4] for size in after) and after[-1] == [3], after
