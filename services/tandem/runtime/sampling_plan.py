"""Which draws of a step its device makes and which are left to the host, as numbers; never draws a token."""

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
    """Rows are counted among those that a step draws from (`Batch.sampled_rows`).

    `picks` holds the row of each draw of the device. `whole` are its numbers (top_k, seed, choice and index, a list of
    all draws each), `real` temperature, top_p and log_min_p likewise; see `contract.SamplingRows`. `host_rows` are
    those that the host draws from. `first` says for each sequence where its draws begin in `picks`, or its rows in
    `host_rows` where it is one of `on_host`. `single` says it for those with one draw, of the device: the next step may
    go on from its token.
    """

    picks: list[int] = field(default_factory=list)
    whole: list[list[int]] = field(default_factory=list)
    real: list[list[float]] = field(default_factory=list)
    host_rows: list[int] = field(default_factory=list)
    first: dict[SeqId, int] = field(default_factory=dict)
    on_host: set[SeqId] = field(default_factory=set)
    single: dict[SeqId, int] = field(default_factory=dict)


def draws_of(works: Iterable[PreparedSlice]) -> SamplingPlan:
    """A draw that looks at more than its logits, or of which more than the token is told, is the host's."""
    draws = SamplingPlan()
    drawn: list[Sampling] = []
    indices: list[int] = []
    row = 0
    for piece in (work.piece for work in works):
        if piece.sampling is None:
            continue
        rows = range(row, row + 1 + piece.num_drafted)
        row = rows.stop
        if not piece.sampling.params.is_plain_at(piece.sampling.index):
            draws.first[piece.seq] = len(draws.host_rows)
            draws.on_host.add(piece.seq)
            draws.host_rows.extend(rows)
            continue
        draws.first[piece.seq] = len(draws.picks)
        if len(rows) == piece.sampling.num_choices == 1:
            draws.single[piece.seq] = len(draws.picks)
        for draw in piece.sampling.per_choice():
            draws.picks.extend(rows)
            drawn += [draw] * len(rows)
            indices += range(draw.index, draw.index + len(rows))
    _number(draws, drawn, indices)
    return draws


def _number(draws: SamplingPlan, drawn: list[Sampling], indices: list[int]) -> None:
    all_params = [draw.params for draw in drawn]
    filters = [filters_of(params) if params.temperature else _GREEDY for params in all_params]
    seeds = [params.seed - 2 * _SIGN if params.seed >= _SIGN else params.seed for params in all_params]
    draws.whole.extend(([one.top_k for one in filters], seeds, [draw.choice for draw in drawn], indices))
    draws.real.extend(([one.temperature for one in filters], [one.top_p for one in filters]))
    draws.real.append([one.log_min_p for one in filters])
