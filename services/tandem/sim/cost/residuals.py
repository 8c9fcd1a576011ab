"""Hold the ratios of measured to predicted step time, by kind of step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.core.step_cost import StepFeatures

PREFILL_EDGES = (1, 33, 97, 193, 257, 513, 1025)
DECODE_EDGES = (1, 2, 3, 4, 6, 9, 13, 17, 33, 65, 129)
"""Lower bounds of the kinds of steps, in prompt tokens and in decoding sequences. Matrix products with few rows take
other code paths in a kernel than products with many, which the five coefficients of a `StepCost` cannot express."""
NUM_QUANTILES = 200
"""Factors kept for one kind at most: enough for its 99.5th percentile."""
LEAST_COUNT = 12
"""Samples below which a kind also takes the samples of its neighbours."""

Kind = tuple[int, int]
"""Number of `PREFILL_EDGES` and number of `DECODE_EDGES` that a step reaches."""


def kind_of(step: StepFeatures) -> Kind:
    return bisect_right(PREFILL_EDGES, step.num_prefill_tokens), bisect_right(DECODE_EDGES, step.num_decode_seqs)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Measured step times divided by predicted ones, by kind of step; the factors of one kind are equally likely.

    Steps with similar numbers of prompt tokens and of decoding sequences are of one kind. A step of a kind without
    samples has the factors of the kind with the nearest numbers; a kind with prompt tokens is far from one without
    them. Raises ValueError for an empty table or a factor that is not above 0."""

    by_kind: Mapping[Kind, tuple[float, ...]]

    def __post_init__(self) -> None:
        if not self.by_kind or any(not factors or min(factors) <= 0 for factors in self.by_kind.values()):
            raise ValueError(f"residuals are factors above 0, got {self.by_kind}")

    def of(self, step: StepFeatures) -> Sequence[float]:
        kind = kind_of(step)
        found = self.by_kind.get(kind)
        return found if found is not None else self.by_kind[min(self.by_kind, key=lambda other: _distance(kind, other))]


def always(*factors: float) -> Residuals:
    """Return residuals in which steps of every kind have the same `factors`, all equally likely."""
    return Residuals({(0, 0): factors})


NONE = always(1.0)
"""Residuals with which every step takes exactly the predicted time."""


def residuals_of(samples: Iterable[tuple[StepFeatures, float]]) -> Residuals:
    """Return the residuals of `samples`, pairs of a step's features and its measured time divided by its predicted
    time.

    Residuals are kept for each kind of step, which `kind_of` defines by the numbers of its prompt tokens and of its
    decodes. A kind with fewer than `LEAST_COUNT` samples also gets those of the kinds with the most similar numbers.
    Raises ValueError without samples.
    """
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
    """Return the medians of `NUM_QUANTILES` equal parts of the sorted values, or all values when there are fewer."""
    ordered = sorted(values)
    count = min(NUM_QUANTILES, len(ordered))
    return tuple(ordered[int((i + 0.5) * len(ordered) / count)] for i in range(count))


def _distance(a: Kind, b: Kind) -> int:
    has_prompts_in_one = (a[0] == 0) != (b[0] == 0)
    return 100 * has_prompts_in_one + abs(a[0] - b[0]) + abs(a[1] - b[1])
