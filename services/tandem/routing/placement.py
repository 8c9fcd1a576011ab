"""Define the outcomes of a search for workers: the placement of a request with its reasons, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ids import WorkerRef
from tandem.routing.cost import PairCost, RemotePrefixPlan
from tandem.routing.picker import PickResult


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers that a request is sent to; `prefill` and `decode` may be the same worker.

    - `prefix`: the first blocks of the prompt that are fetched from another worker's cache; None: nothing is fetched.
    - `fallback`: why the request runs on one worker although it should have been split between two; empty where this is
      not the case.
    - `why`: why one worker was cheaper than two; empty unless both were compared and one was.
    - `picked`: the predicted cost, and how the placement was picked; None under other policies than cost.
    - `other`: the cheapest placement on two workers when this one is on one, or the reverse; None unless both were
      compared.
    """

    prefill: WorkerRef
    decode: WorkerRef
    prefix: RemotePrefixPlan | None = None
    fallback: str = ""
    why: str = ""
    picked: PickResult | None = None
    other: PairCost | None = None

    @property
    def is_remote(self) -> bool:
        return self.prefill != self.decode

    @property
    def path(self) -> str:
        """Return where the request runs, as the response reports it: "remote" on two workers, else "local" or
        "fallback" with the reason."""
        if self.is_remote:
            return "remote"
        if self.fallback:
            return f"fallback;reason={self.fallback}"
        return f"local;reason={self.why}" if self.why else "local"

    @property
    def reasons(self) -> dict[str, object]:
        """Return the decision and its predicted costs as a JSON object, for people: the chosen workers, how they were
        picked, and the parts of the cost in milliseconds.

        The costs `decode`, `stall` and `no_room` are not plain times: they are weighted as in `routing.cost`.
        """
        reasons: dict[str, object] = {"prefill": self.prefill.id, "decode": self.decode.id}
        if self.prefix is not None:
            reasons["prefix"] = {"source": self.prefix.producer.id, "num_blocks": self.prefix.num_blocks}
        if self.picked is not None:
            reasons |= {
                "by": self.picked.by,
                "num_near": self.picked.num_near,
                "cost_ms": _cost_as_json(self.picked.cost),
            }
        if self.other is not None:
            prefill = self.other.prefill.worker.ref.id
            decode = self.other.decode.worker.ref.id
            reasons["other"] = {"prefill": prefill, "decode": decode, "cost_ms": _cost_as_json(self.other)}
        return reasons


def _cost_as_json(cost: PairCost) -> dict[str, object]:
    seconds = {
        "total": cost.total_s,
        "wait": cost.prefill.wait_s,
        "read": cost.prefill.read_s,
        "prefill": cost.prefill.compute_s,
        "transfer": cost.transfer_s,
        "stall": cost.prefill.stall_s + (0.0 if cost.is_local else cost.decode.prompts_s),
        "decode": cost.decode.decode_s,
        "no_room": cost.decode.room_s,
    }
    return {
        **{name: round(1e3 * value, 3) for name, value in seconds.items()},
        "num_uncached": cost.prefill.num_uncached,
    }


@dataclass(frozen=True, slots=True)
class NoPlacement:
    """Result of a search that found no worker for a request: `router.place` returns it, and no code raises it.

    `reason`: a text for people. `may_pass`: True when waiting may help, because usable workers exist that are busy,
    full or not linked yet. While such a request waits, the prompts of less urgent lanes are not placed on the workers
    that serve its lane. False when no usable worker exists: the request may wait for one, but keeps no other request
    waiting.
    """

    reason: str
    may_pass: bool
