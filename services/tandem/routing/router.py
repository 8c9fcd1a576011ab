"""Chooses the workers of one request: filter, score, pick; never sends anything and keeps no state.

The least loaded worker wins, ties go to the smaller worker id, so that equal views give equal placements.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tandem.core.ids import WorkerRef
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.view import ClusterView, WorkerView

Disaggregation = Literal["off", "prefer", "strict"]


def place(
    view: ClusterView, model: str, policy: Disaggregation, excluded: frozenset[WorkerRef] = frozenset()
) -> Placement | NoPlacement:
    """Pick a pair under `policy`; `excluded` workers refused this request a moment ago."""
    able = [w for w in view.workers if w.model == model and not w.load.draining]
    if not able:
        return NoPlacement("no live worker serves the model", may_pass=False)
    workers = [w for w in able if w.ref not in excluded]
    local = _local(workers)
    wants_split = policy == "strict" or (policy == "prefer" and any(w.pool != "mixed" for w in able))
    if not wants_split:
        return local or NoPlacement("every worker is full", may_pass=True)
    split = _split(view, workers, allow_mixed_pairs=policy == "strict")
    if isinstance(split, Placement):
        return split
    if policy == "strict" or split.may_pass or _is_split_possible(view, able):
        return split
    if local is None:
        return NoPlacement("every worker is full", may_pass=True)
    return Placement(local.prefill, local.decode, fallback=split.reason.replace(" ", "_"), reasons=local.reasons)


def _split(view: ClusterView, workers: list[WorkerView], *, allow_mixed_pairs: bool) -> Placement | NoPlacement:
    givers, takers = [w for w in workers if w.prefills], [w for w in workers if w.decodes]
    if not any(w.pool == "prefill" or allow_mixed_pairs for w in givers):
        return NoPlacement("no prefill worker", may_pass=False)
    if not takers:
        return NoPlacement("no decode worker", may_pass=False)
    # Giver by giver, because there are as many pairs as the square of the workers, and the first giver mostly does.
    for prefill in sorted(givers, key=_prefill_cost):
        ready = [d for d in takers if _may_pair(prefill, d) and (prefill.ref, d.ref) in view.linked]
        if ready:
            break
    else:
        return _why_no_pair(view, givers, takers)
    decode = min(ready, key=_decode_cost)
    reasons = (f"prefill {prefill.ref.id}: {prefill.queued_tokens} tokens queued",
               f"decode {decode.ref.id}: {decode.load.num_running} running")  # fmt: skip
    return Placement(prefill.ref, decode.ref, reasons=reasons)


def _may_pair(prefill: WorkerView, decode: WorkerView) -> bool:
    return prefill.ref != decode.ref and prefill.fingerprint == decode.fingerprint


def _why_no_pair(view: ClusterView, givers: list[WorkerView], takers: list[WorkerView]) -> NoPlacement:
    pairs = [(p.ref, d.ref) for p in givers for d in takers if _may_pair(p, d)]
    if not pairs:
        return NoPlacement("no worker of the same model build", may_pass=False)
    return NoPlacement("no link between the workers", may_pass=any(pair not in view.unlinked for pair in pairs))


def _is_split_possible(view: ClusterView, able: list[WorkerView]) -> bool:
    """A linked pair lives but is excluded for the moment: then the request waits instead of falling back. Without a
    prefill worker no pair is ever chosen under "prefer", however many are linked."""
    refs = {w.ref for w in able}
    return any(w.pool == "prefill" for w in able) and any(p in refs and d in refs for p, d in view.linked)


def _local(workers: list[WorkerView]) -> Placement | None:
    """One worker for all of it. Pools are labels: a prefill worker decodes too when there is no other."""
    chosen = _least([w for w in workers if w.decodes]) or _least(workers)
    if chosen is None:
        return None
    return Placement(chosen.ref, chosen.ref, reasons=(f"{chosen.ref.id}: {chosen.load.num_running} running",))


def _least(workers: Iterable[WorkerView]) -> WorkerView | None:
    return min(workers, key=lambda w: (w.queued_tokens, _decode_cost(w)), default=None)


def _prefill_cost(worker: WorkerView) -> tuple[int, str]:
    return (worker.queued_tokens, worker.ref.id)


def _decode_cost(worker: WorkerView) -> tuple[int, int, str]:
    load = worker.load
    return (load.num_running + load.num_waiting, load.num_promised_blocks - load.num_free_blocks, worker.ref.id)
