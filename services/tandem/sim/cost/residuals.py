"""How measured steps scatter around a model of their time, by what kind of step they were; never draws one itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.core.step_cost import StepFeatures

PREFILL_EDGES = (1, 33, 97, 193, 257, 513, 1025)
DECODE_EDGES = (1, 2, 3, 4, 6, 9, 13, 17, 33, 65, 129)
"""Where kinds begin, in prompt tokens and decoding sequences: products of few rows take other ways through a kernel
than those of many, which five coefficients cannot say."""
NUM_QUANTILES = 200
"""Of one kind at most: enough to tell its 99.5th percentile."""
LEAST_COUNT = 12
"""A kind that was seen more rarely shares what its neighbours saw."""

Kind = tuple[int, int]
"""How many of `PREFILL_EDGES` and `DECODE_EDGES` a step reaches."""


def kind_of(step: StepFeatures) -> Kind:
    return bisect_right(PREFILL_EDGES, step.num_prefill_tokens), bisect_right(DECODE_EDGES, step.num_decode_seqs)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Factors above 0 on a model's time, each as likely as any other of its kind. A step of a kind that was never seen
    has those of the nearest one, for which a row without prompts is far from one with them."""

    by_kind: Mapping[Kind, tuple[float, ...]]

    def __post_init__(self) -> None:
        if not self.by_kind or any(not factors or min(factors) <= 0 for factors in self.by_kind.values()):
            raise ValueError(f"residuals are factors above 0, got {self.by_kind}")

    def of(self, step: StepFeatures) -> Sequence[float]:
        kind = kind_of(step)
        found = self.by_kind.get(kind)
        return found if found is not None else self.by_kind[min(self.by_kind, key=lambda other: _distance(kind, other))]


def always(*factors: float) -> Residuals:
    """The same for steps of every kind."""
    return Residuals({(0, 0): factors})


NONE = always(1.0)
"""Every step takes what the model says."""


def residuals_of(samples: Iterable[tuple[StepFeatures, float]]) -> Residuals:
    """From (step, measured by predicted time). Raises ValueError without samples."""
    by_kind: dict[Kind, list[float]] = {}
    for step, ratio in samples:
        by_kind.setdefault(kind_of(step), []).append(ratio)
    return Residuals({kind: _quantiles(_with_neighbours(kind, by_kind)) for kind in sorted(by_kind)})


def _with_neighbours(kind: Kind, by_kind: Mapping[Kind, Sequence[float]]) -> list[float]:
    found: list[float] = []
    for other in sorted(by_kind, key=lambda other: (_distance(kind, other), other)):
        if len(found) >= LEAST_COUNT:
            break
        found += by_kind[other]
    return found


def _quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """The middles of `NUM_QUANTILES` equal shares, or all of few values."""
    ordered = sorted(values)
    count = min(NUM_QUANTILES, len(ordered))
    return tuple(ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count))


def _distance(a: Kind, b: Kind) -> int:
    has_prompts_in_one = (a[0] == 0) != (b[0] == 0)
    return 100 * has_prompts_in_one + abs(a[0] - b[0]) + abs(a[1] - b[1])
