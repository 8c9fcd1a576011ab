"""How many examples the property tests try: few in every run, many under TANDEM_SOAK=1; never what they try."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

IS_SOAK = os.environ.get("TANDEM_SOAK") == "1"
SOAK_FACTOR = 60


def effort(examples: int, steps: int = 50) -> settings:
    """`steps` bounds the rules of one run of a state machine. Soaking draws new examples each time."""
    return settings(
        max_examples=examples * (SOAK_FACTOR if IS_SOAK else 1),
        stateful_step_count=steps,
        derandomize=not IS_SOAK,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
