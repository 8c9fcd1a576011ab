"""Split the sampling of a step between device and host, and list the parameters of the device's samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.core.ids import SeqId
from tandem.runtime.sampler import filters_of
from tandem.runtime.slice_work import PreparedSlice
from tandem.sched.state.step_plan import Sampling
from tandem_kernels.reference.sample import Filters

_SIGN = 1 << 63
_GREEDY = Filters(0.0, 0, 1.0, float("-inf"))


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Assignment of the samples of a step to device and host, with the parameters of the device's samples.

    Row numbers index `Batch.sampled_rows`.

    - `picks`: row of each device sample.
    - `whole`: integer parameters of the device samples, one list each for top_k, seed, choice and index. `real`: their
      float parameters, one list each for temperature, top_p and log_min_p; see `contract.SamplingRows`.
    - `host_rows`: rows that the host samples from. `on_host`: sequences that the host samples.
    - `first`: for each sequence, the index of its first sample in `picks`, or of its first row in `host_rows` if it is
      in `on_host`.
    - `single`: for each sequence with exactly one sample, taken on the device, its index in `picks`; the next step may
      take this token as its input.
    """

    picks: list[int] = field(default_factory=list)
    whole: list[list[int]] = field(default_factory=list)
    real: list[list[float]] = field(default_factory=list)
    host_rows: list[int] = field(default_factory=list)
    first: dict[SeqId, int] = field(default_factory=dict)
    on_host: set[SeqId] = field(default_factory=set)
    single: dict[SeqId, int] = field(default_factory=dict)


def plan_sampling(slices: Iterable[PreparedSlice]) -> SamplingPlan:
    """Assign the samples of a step's slices to the device or the host, and return the assignment.

    The host samples where the result depends on more than the logits (penalties, biases, grammars), or where log
    probabilities are returned with the token."""
    plan = SamplingPlan()
    samplings: list[Sampling] = []
    indices: list[int] = []
    row = 0
    for piece in (prepared.piece for prepared in slices):
        if piece.sampling is None:
            continue
        rows = range(row, row + 1 + piece.num_drafted)
        row = rows.stop
        if not piece.sampling.params.is_plain_at(piece.sampling.index):
            plan.first[piece.seq] = len(plan.host_rows)
            plan.on_host.add(piece.seq)
            plan.host_rows.extend(rows)
            continue
        plan.first[piece.seq] = len(plan.picks)
        if len(rows) == piece.sampling.num_choices == 1:
            plan.single[piece.seq] = len(plan.picks)
        for sampling in piece.sampling.per_choice():
            plan.picks.extend(rows)
            samplings += [sampling] * len(rows)
            indices += range(sampling.index, sampling.index + len(rows))
    _add_parameters(plan, samplings, indices)
    return plan


def _add_parameters(plan: SamplingPlan, samplings: list[Sampling], indices: list[int]) -> None:
    """Append the parameters of the device samples to `plan`; seeds become signed 64-bit numbers with the same bits."""
    all_params = [sampling.params for sampling in samplings]
    filters = [filters_of(params) if params.temperature else _GREEDY for params in all_params]
    seeds = [params.seed - 2 * _SIGN if params.seed >= _SIGN else params.seed for params in all_params]
    plan.whole.extend(([row.top_k for row in filters], seeds, [sampling.choice for sampling in samplings], indices))
    plan.real.extend(([row.temperature for row in filters], [row.top_p for row in filters]))
    plan.real.append([row.log_min_p for row in filters])
