"""A plan in the making; only the Scheduler writes it, and only while it plans."""

from __future__ import annotations

from tandem.core.ids import SeqId
from tandem.sched.outcome import Offer, PullGrant
from tandem.sched.plan import Slice


class Draft:
    """`budget` is what is left of the step's tokens; `slices` keeps the order in which they were planned."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.slices: dict[SeqId, Slice] = {}
        self.pulls: list[PullGrant] = []
        self.offers: list[Offer] = []
        self.num_preempted = 0
        self.has_prefill = False
