"""Has Ray Serve run so many replicas, by telling its autoscaling policy, and sets the roles of workers; never starts or
ends a worker itself.

`tandem.planner.serve_policy` reads the target where Serve decides. Which worker ends is Serve's choice, and it drains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tandem.core.ids import PlannerId, ServeId
from tandem.planner.actuator import ActuationResult, ActuatorFailed
from tandem.planner.pool_targets import wanted
from tandem.planner.worker_inventory import WorkerInventory
from tandem.planner.worker_state import WorkerState
from tandem.scaling.decision import Decision
from tandem.stores.replica_targets import ReplicaTargets, TargetRecord, TargetsUnavailable
from tandem.stores.worker_registry import RegistryUnavailable


class ServeActuator:
    """An Actuator. One planner is heard at a time: the first, until it has been silent for a while. `most` as
    `pools.wanted` takes it."""

    def __init__(
        self, me: PlannerId, targets: ReplicaTargets, census: WorkerInventory, most: Mapping[str, int]
    ) -> None:
        self._me = me
        self._targets = targets
        self._census = census
        self.most = most
        self._said: set[str] = set()
        self._known: dict[str, dict[str, int]] = {}
        self.leads = False

    async def starting(self, model: str, workers: Sequence[WorkerState]) -> dict[str, int]:
        """What Serve means to have counts, else what it was told last, else what was known before: a Redis that has
        just begun anew knows nothing, and a few workers already, who are not all."""
        try:
            said, deployed = await self._targets.read(model), await self._targets.deployed(model)
        except TargetsUnavailable as error:
            raise ActuatorFailed(f"the target cannot be read: {error}") from error
        told = {**(said.replicas if said is not None else {}), **_of_one_serve(model, deployed)}
        known = self._known[model] = self._known.get(model, {}) | told
        there = Counter(worker.pool for worker in workers if worker.model == model and not worker.is_draining)
        return {role: max(0, number - there[role]) for role, number in known.items()}

    async def carry_out(
        self, model: str, decision: Decision, workers: Sequence[WorkerState], starting: Mapping[str, int]
    ) -> ActuationResult:
        mine = [worker for worker in workers if worker.model == model]
        replicas, changed = wanted(decision, mine, starting, self.most)
        holder = await self.say(model, replicas, decision.reasons)
        if holder != self._me:
            return ActuationResult("standby", {}, (f"planner {holder} is heard, this one is not",))
        return ActuationResult("carried_out", replicas, await self.change_roles(changed))

    async def say(self, model: str, replicas: Mapping[str, int], reasons: tuple[str, ...]) -> PlannerId:
        """Returns who is heard."""
        record = TargetRecord(model=model, planner=self._me, replicas=replicas, reasons=reasons)
        try:
            holder = await self._targets.publish(record)
        except TargetsUnavailable as error:
            raise ActuatorFailed(f"the target cannot be told: {error}") from error
        self.leads = holder == self._me
        self._said.add(model)
        return holder

    async def change_roles(self, changed: Mapping[WorkerState, str]) -> tuple[str, ...]:
        """Says which."""
        told: list[str] = []
        for worker, role in changed.items():
            try:
                is_there = await self._census.set_role(worker, role)
            except RegistryUnavailable as error:
                raise ActuatorFailed(f"the role of {worker.ref.id} cannot be set: {error}") from error
            if is_there:
                told.append(f"{worker.ref.id} serves as {role} from now on, no more as {worker.role}")
        return tuple(told)

    async def close(self) -> None:
        """Another planner may begin at once."""
        try:
            for model in self._said if self.leads else ():
                await self._targets.resign(model, self._me)
        except TargetsUnavailable:
            return
        finally:
            await self._targets.close()


def _of_one_serve(model: str, deployed: Mapping[str, Mapping[ServeId, int]]) -> dict[str, int]:
    """Raises ActuatorFailed where there are several: each would be told to have as many as all of them have."""
    for role, numbers in deployed.items():
        if len(numbers) > 1:
            raise ActuatorFailed(
                f"{len(numbers)} Serves have {role} workers of {model}, as in an upgrade: all stay as they are "
                f"({', '.join(sorted(numbers))})"
            )
    return {role: number for role, numbers in deployed.items() for number in numbers.values()}
