"""How many examples the property tests try: few in every run, fewer under TANDEM_QUICK=1, many under TANDEM_SOAK=1;
never what they try."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

IS_SOAK = os.environ.get("TANDEM_SOAK") == "1"
SOAK_FACTOR = 60
IS_QUICK = os.environ.get("TANDEM_QUICK") == "1"
QUICK_PART = 8


def effort(examples: int, steps: int = 50) -> settings:
    """`steps` bounds the rules of one run of a state machine. Soaking draws new examples each time, `make check` only
    some of the usual ones, and shorter runs."""
    number = examples // QUICK_PART if IS_QUICK else examples
    return settings(
        max_examples=examples * SOAK_FACTOR if IS_SOAK else max(1, number),
        stateful_step_count=steps // 2 if IS_QUICK else steps,
        derandomize=not IS_SOAK,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
