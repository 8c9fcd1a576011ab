"""Sets how many examples random tests try, by the target that runs them: `make check`, `make test` or `make nightly`.

`TANDEM_TEST_EFFORT` names the target; without it tests run as in `make test`.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

EFFORT = os.environ.get("TANDEM_TEST_EFFORT", "test")
IS_CHECK = EFFORT == "check"
IS_NIGHTLY = EFFORT == "nightly"
PHASES = tuple(phase for phase in Phase if phase is not Phase.shrink or not os.environ.get("TANDEM_NO_SHRINKING"))
"""All that hypothesis does; where mutants are tested, nobody reads the smallest example that fails."""
_FACTORS = {"check": 1 / 8, "test": 1 / 2, "nightly": 15}


def scaled(number: int) -> int:
    """Return how many examples to try: `number` times an eighth, a half or fifteen, depending on the target."""
    return max(1, int(number * _FACTORS[EFFORT]))


def effort(examples: int, steps: int = 50) -> settings:
    """Return settings for hypothesis: `scaled(examples)`, each of at most `steps` rules of a state machine.

    `make nightly` draws new examples each time; the other targets the same ones in every run, so that a red test stays
    red. `make check` runs shorter examples too.
    """
    return settings(
        max_examples=scaled(examples),
        stateful_step_count=steps // 2 if IS_CHECK else steps,
        derandomize=not IS_NIGHTLY,
        phases=PHASES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
