"""Hold back the pulls whose blocks an open plan still copies to host memory or back.

A transfer may not write into a block that is still to be copied out, and a block that is still to be copied in does not
hold its content yet. Such a pull begins when the plan is finished; until then the plan counts as one that names the
sequence, so the sequence keeps its blocks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from tandem.core.ids import JobKey
from tandem.sched.state.schedule_result import PullAllocated
from tandem.sched.state.sequence import Sequence as Seq
from tandem.sched.state.sequence import Status
from tandem.sched.state.step_plan import StepPlan


class BlockedPulls:
    """Own the pulls that wait for a plan to finish. `has_clear`: pulls are ready to begin."""

    def __init__(self) -> None:
        self._by_plan: dict[int, list[tuple[Seq, PullAllocated]]] = {}
        self._clear: list[PullAllocated] = []

    @property
    def has_clear(self) -> bool:
        return bool(self._clear)

    def num_plans(self, seq: Seq) -> int:
        """Count the open plans for which this sequence's pull waits."""
        return sum(1 for held in self._by_plan.values() for waiting, _ in held if waiting is seq)

    def take_clear(self, pulling: Container[JobKey]) -> list[PullAllocated]:
        """Return the pulls that are ready to begin and whose jobs have not ended meanwhile."""
        clear, self._clear = self._clear, []
        return [grant for grant in clear if grant.key in pulling]

    def hold(
        self, grants: Sequence[PullAllocated], plans: Iterable[StepPlan], pulling: Mapping[JobKey, Seq]
    ) -> list[PullAllocated]:
        """Hold back the pulls with blocks that one of the open plans (oldest first) copies; return the others."""
        last = {block: plan.number for plan in plans for block in plan.host_copied_blocks}
        free: list[PullAllocated] = []
        for grant in grants:
            number = max((last[block] for block in grant.table.ids() if block in last), default=None) if last else None
            if number is None:
                free.append(grant)
                continue
            seq = pulling[grant.key]
            seq.num_open_plans += 1
            self._by_plan.setdefault(number, []).append((seq, grant))
        return free

    def committed(self, number: int) -> None:
        """Release the pulls that waited for a plan; those whose sequences have ended meanwhile are dropped."""
        held = self._by_plan.pop(number, [])
        for seq, _ in held:
            seq.num_open_plans -= 1
        self._clear += [grant for seq, grant in held if seq.status is not Status.CLOSING]
