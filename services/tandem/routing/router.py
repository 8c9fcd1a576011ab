"""Chooses the workers of one request: filter, score, pick; never sends anything and keeps no state.

The least loaded worker wins, ties go to the smaller worker id, so that equal views give equal placements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, Protocol

from tandem.core.ids import WorkerRef
from tandem.core.lane import Lane
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.view import Pair, Pool, Ranking, WorkerView

Disaggregation = Literal["off", "prefer", "strict"]


class Candidates(Protocol):
    """What a choice is made from: workers that serve a model and take new work, by rising cost, of which
    mostly little is taken; nothing may change while a ranking is open, and none may be opened twice."""

    @property
    def linked(self) -> Set[Pair]: ...

    @property
    def unlinked(self) -> Set[Pair]: ...

    def pools(self, model: str) -> Counter[Pool]:
        """How many there are with each label."""
        ...

    def find(self, model: str, ref: WorkerRef) -> WorkerView | None: ...

    def givers(self, model: str) -> Ranking:
        """Those that prefill."""
        ...

    def takers(self, model: str) -> Ranking:
        """Those that decode."""
        ...

    def wholes(self, model: str) -> Ranking:
        """All, for both in one place: those that decode first."""
        ...


@dataclass(frozen=True, slots=True)
class Want:
    """What is to be placed: a prompt with probably `num_tokens` to compute."""

    model: str
    num_tokens: int = 1
    lane: Lane = Lane.INTERACTIVE


BUSY = NoPlacement("every worker has as much of prompts as it takes on", may_pass=True)
"""Nothing but a worker that computes prompts can change that."""


def place(
    among: Candidates, want: Want, policy: Disaggregation, excluded: Set[WorkerRef] = frozenset()
) -> Placement | NoPlacement:
    """Pick a pair under `policy`; `excluded` workers refused a moment ago."""
    model = want.model
    able = among.pools(model)
    if not able.total():
        return NoPlacement("no live worker serves the model", may_pass=False)
    if policy == "off" or (policy == "prefer" and able["mixed"] == able.total()):
        return _local(among, want, excluded)
    split = _split(among, want, excluded, allow_mixed_pairs=policy == "strict")
    if isinstance(split, Placement):
        return split
    if policy == "strict" or split.may_pass or _is_split_possible(among, model):
        return split
    local = _local(among, want, excluded)
    if isinstance(local, NoPlacement):
        return local
    return Placement(local.prefill, local.decode, fallback=split.reason.replace(" ", "_"), reasons=local.reasons)


def _split(
    among: Candidates, want: Want, excluded: Set[WorkerRef], *, allow_mixed_pairs: bool
) -> Placement | NoPlacement:
    model, is_busy = want.model, False
    left = _pools_left(among, model, excluded)
    if not left["prefill"] and not (allow_mixed_pairs and left["mixed"]):
        return NoPlacement("no prefill worker", may_pass=False)
    if not left["decode"] and not left["mixed"]:
        return NoPlacement("no decode worker", may_pass=False)
    # Giver by giver, because there are as many pairs as the square of the workers, and the first giver mostly does.
    with closing(_but(among.givers(model), excluded)) as givers:
        for prefill in givers:
            if not prefill.takes(want.num_tokens, want.lane):
                is_busy = True
                continue
            decode = _partner(among, model, prefill, excluded)
            if decode is not None:
                reasons = (f"prefill {prefill.ref.id}: {prefill.queued_tokens} tokens queued",
                           f"decode {decode.ref.id}: {decode.load.num_running} running")  # fmt: skip
                return Placement(prefill.ref, decode.ref, reasons=reasons)
    return BUSY if is_busy else _why_no_pair(among, model, excluded)


def _pools_left(among: Candidates, model: str, excluded: Set[WorkerRef]) -> Counter[Pool]:
    gone = Counter(view.pool for ref in excluded if (view := among.find(model, ref)) is not None)
    return among.pools(model) - gone


def _partner(among: Candidates, model: str, prefill: WorkerView, excluded: Set[WorkerRef]) -> WorkerView | None:
    with closing(_but(among.takers(model), excluded)) as takers:
        for decode in takers:
            if _may_pair(prefill, decode) and (prefill.ref, decode.ref) in among.linked:
                return decode
    return None


def _may_pair(prefill: WorkerView, decode: WorkerView) -> bool:
    return prefill.ref != decode.ref and prefill.fingerprint == decode.fingerprint


def _why_no_pair(among: Candidates, model: str, excluded: Set[WorkerRef]) -> NoPlacement:
    givers, takers = list(_but(among.givers(model), excluded)), list(_but(among.takers(model), excluded))
    pairs = [(p.ref, d.ref) for p in givers for d in takers if _may_pair(p, d)]
    if not pairs:
        return NoPlacement("no worker of the same model build", may_pass=False)
    return NoPlacement("no link between the workers", may_pass=any(pair not in among.unlinked for pair in pairs))


def _is_split_possible(among: Candidates, model: str) -> bool:
    """A linked pair lives but is excluded for the moment: then the request waits instead of falling back. Without a
    prefill worker no pair is ever chosen under "prefer", however many are linked."""
    if not among.pools(model)["prefill"]:
        return False
    return any(among.find(model, p) is not None and among.find(model, d) is not None for p, d in among.linked)


def _local(among: Candidates, want: Want, excluded: Set[WorkerRef]) -> Placement | NoPlacement:
    """One worker for all of it."""
    is_busy = False
    with closing(_but(among.wholes(want.model), excluded)) as workers:
        for chosen in workers:
            if is_busy and not chosen.decodes:
                break
            if chosen.takes(want.num_tokens, want.lane):
                reasons = (f"{chosen.ref.id}: {chosen.load.num_running} running",)
                return Placement(chosen.ref, chosen.ref, reasons=reasons)
            is_busy = True
    return BUSY if is_busy else NoPlacement("every worker is full", may_pass=True)


def _but(workers: Ranking, excluded: Set[WorkerRef]) -> Ranking:
    with closing(workers):
        for worker in workers:
            if worker.ref not in excluded:
                yield worker
