"""Owns the pulls whose blocks an open plan still copies out to host memory or in from there; never grants one.

A read may not write into a block that is yet to be copied out, and what is yet to be copied in is not there. So such a
pull begins when that plan is over; until then the plan names its sequence, which keeps its blocks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from tandem.core.ids import JobKey
from tandem.sched.state.schedule_result import PullAllocated
from tandem.sched.state.sequence import Sequence as Seq
from tandem.sched.state.sequence import Status
from tandem.sched.state.step_plan import StepPlan


class BlockedPulls:
    """`has_clear`: some may begin now that waited for a plan."""

    def __init__(self) -> None:
        self._by_plan: dict[int, list[tuple[Seq, PullAllocated]]] = {}
        self._clear: list[PullAllocated] = []

    @property
    def has_clear(self) -> bool:
        return bool(self._clear)

    def num_plans(self, seq: Seq) -> int:
        """Open plans that hold this one up."""
        return sum(1 for held in self._by_plan.values() for one, _ in held if one is seq)

    def take_clear(self, pulling: Container[JobKey]) -> list[PullAllocated]:
        """Those that may begin and whose jobs have not ended meanwhile."""
        clear, self._clear = self._clear, []
        return [grant for grant in clear if grant.key in pulling]

    def hold(
        self, grants: Sequence[PullAllocated], plans: Iterable[StepPlan], pulling: Mapping[JobKey, Seq]
    ) -> list[PullAllocated]:
        """Keep back those with blocks that one of these open plans copies, oldest first; the others may begin."""
        last = {block: plan.number for plan in plans for block in plan.host_copied_blocks}
        free: list[PullAllocated] = []
        for grant in grants:
            number = max((last[block] for block in grant.blocks if block in last), default=None) if last else None
            if number is None:
                free.append(grant)
                continue
            seq = pulling[grant.key]
            seq.num_open_plans += 1
            self._by_plan.setdefault(number, []).append((seq, grant))
        return free

    def committed(self, number: int) -> None:
        """A plan is over. Those that it held up and that have ended meanwhile are forgotten."""
        held = self._by_plan.pop(number, [])
        for seq, _ in held:
            seq.num_open_plans -= 1
        self._clear += [grant for seq, grant in held if seq.status is not Status.CLOSING]
