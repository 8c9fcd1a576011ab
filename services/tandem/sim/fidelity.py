"""How far predictions of rooflines were from published figures; never a measurement of ours."""

from __future__ import annotations

from tandem.sim.roofline import Roofline


def fidelity(roofline: Roofline) -> str:
    return "unknown"
