"""Ray Serve's own reading of its document; never runs anything of it."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own ways with its libraries
    from ray.serve.schema import ServeDeploySchema

__all__ = ["ServeDeploySchema"]
