"""What settings come to that leave a value to the device; never looks at the device itself.

A function of the tree alone, so that every process that is given the same settings reads the same numbers in them.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.core.config import Config

CPU_PLANS, CUDA_PLANS = 1, 2


def by_device(config: Config) -> Config:
    """The same tree with values in place of what stands for one; a second time it changes nothing."""
    engine = config.engine
    is_cuda = config.model.device == "cuda"
    # Guesses begin with the last token, which nobody knows while the step that draws it runs.
    may_overlap = is_cuda and config.speculative.method == "off"
    plan_depth = engine.plan_depth or (CUDA_PLANS if may_overlap else CPU_PLANS)
    return replace(config, engine=replace(engine, plan_depth=plan_depth))
