"""Set the number of replicas in Ray Serve through its autoscaling policy, and set the roles of workers.

The policy, `tandem.planner.serve_policy`, runs inside Serve and reads the target. Serve starts and ends the workers,
and chooses which worker ends; that worker drains first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.core.ids import PlannerId, ServeId
from tandem.planner.actuator import ActuationResult, ActuatorFailed
from tandem.planner.pool_targets import PoolTargets
from tandem.planner.worker_inventory import WorkerInventory
from tandem.scaling.worker_state import WorkerState
from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.replica_targets import ReplicaTargets, TargetRecord


@dataclass(slots=True, eq=False)
class ServeActuator:
    """Actuator that publishes target numbers of replicas for Ray Serve's autoscaling, through Redis.

    `me`: name of this planner. `targets`: the store of targets. `inventory`: sets the roles of workers. `minimums`:
    smallest number of workers by role, published with the targets. `leads`: whether Serve follows this planner's
    targets. Serve follows the first planner that publishes targets; it follows another one only after the first has
    published none for a while."""

    me: PlannerId
    targets: ReplicaTargets
    inventory: WorkerInventory
    minimums: Mapping[str, int]
    leads: bool = field(default=False, init=False)
    _published_models: set[str] = field(default_factory=set, init=False)
    _known: dict[str, dict[str, int]] = field(default_factory=dict, init=False)

    async def starting(self, model: str, workers: Sequence[WorkerState]) -> dict[str, int]:
        """Return how many replicas of `model` Serve is starting, by the role of their pool.

        The result is a total minus the number of registered workers that do not drain. The total is the number of
        replicas that Serve reports; if Serve reports none, the published target; if there is no target either, the
        total of the previous call. The previous total is needed after a restart of Redis, when there is no target and
        only some workers have registered again. `workers`: all registered workers, of all models. Raises
        ActuatorFailed."""
        try:
            target, deployed = await self.targets.read(model), await self.targets.deployed(model)
        except StoreUnavailable as error:
            raise ActuatorFailed(f"the target cannot be read: {error}") from error
        updates = {**(target.replicas if target is not None else {}), **_of_one_serve(model, deployed)}
        known = self._known.get(model, {}) | updates
        self._known[model] = known
        num_registered = Counter(worker.pool for worker in workers if worker.model == model and not worker.is_draining)
        return {role: max(0, number - num_registered[role]) for role, number in known.items()}

    async def carry_out(
        self, model: str, targets: PoolTargets, reasons: tuple[str, ...], workers: Sequence[WorkerState]
    ) -> ActuationResult:
        holder = await self.publish_target(model, targets.replicas, reasons)
        if holder != self.me:
            return ActuationResult("standby", {}, (f"planner {holder} sets the targets, this one is on standby",))
        return ActuationResult("carried_out", targets.replicas, await self.change_roles(targets.changed))

    async def publish_target(self, model: str, replicas: Mapping[str, int], reasons: tuple[str, ...]) -> PlannerId:
        """Publish the target numbers of replicas of `model`, by role, and return the planner whose targets Serve
        follows.

        If the returned planner is another one, the published target has no effect. `reasons`: sentences for people,
        stored with the target. Raises ActuatorFailed when Redis does not answer."""
        record = TargetRecord(model=model, planner=self.me, replicas=replicas, reasons=reasons, minimums=self.minimums)
        try:
            holder = await self.targets.publish(record)
        except StoreUnavailable as error:
            raise ActuatorFailed(f"the target cannot be published: {error}") from error
        self.leads = holder == self.me
        self._published_models.add(model)
        return holder

    async def change_roles(self, changed: Mapping[WorkerState, str]) -> tuple[str, ...]:
        """Set the new role of each worker in `changed`, and return a sentence for each worker whose role was set.

        A worker that is not registered any more is left out. Raises ActuatorFailed when Redis does not answer."""
        changes: list[str] = []
        for worker, role in changed.items():
            try:
                is_there = await self.inventory.set_role(worker, role)
            except StoreUnavailable as error:
                raise ActuatorFailed(f"the role of {worker.ref.id} cannot be set: {error}") from error
            if is_there:
                changes.append(f"{worker.ref.id} serves as {role} from now on, no more as {worker.role}")
        return tuple(changes)

    async def close(self) -> None:
        """Give up the leadership and close the store.

        If Ray Serve follows this planner's targets (`leads`), it keeps the last published numbers of replicas until
        another planner publishes targets, and follows those from then on. Raises nothing when Redis does not answer:
        the leadership then ends when this planner has published nothing for a while."""
        try:
            for model in self._published_models if self.leads else ():
                await self.targets.resign(model, self.me)
        except StoreUnavailable:
            return
        finally:
            await self.targets.close()


def _of_one_serve(model: str, deployed: Mapping[str, Mapping[ServeId, int]]) -> dict[str, int]:
    """Return the replicas by role if one Serve reports them. Raises ActuatorFailed for several, because each of them
    would be set to the sum of all."""
    for role, numbers in deployed.items():
        if len(numbers) > 1:
            raise ActuatorFailed(
                f"{len(numbers)} Serves have {role} workers of {model}, as in an upgrade: all stay as they are "
                f"({', '.join(sorted(numbers))})"
            )
    return {role: number for role, numbers in deployed.items() for number in numbers.values()}
