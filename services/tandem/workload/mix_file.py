"""Parse a mix from YAML strictly: for an unknown, missing or impossible value an error names the file and the key.

The section "Workloads" of loadtest/README.md describes each key.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from tandem.core.lane import Lane
from tandem.workload.arrivals import Arrivals, Batches, Bursts, Constant, Poisson
from tandem.workload.lengths import MAX_TOKENS, Lengths, LogNormal, Quantiles
from tandem.workload.mix import Mix
from tandem.workload.request_class import Prefix, RequestClass
from tandem.workload.yaml_field import Field, StrictLoader, refused


def read_mix(path: Path) -> Mix:
    """Read a mix from a YAML file.

    Raises TandemError(INVALID_REQUEST) that names file and key if the file cannot be read or a value is unknown,
    missing or invalid."""
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise refused(str(path), f"cannot be read: {error}") from error
    root = Field(str(path), "", value)
    found = root.record(("groups",), ("rate", "arrivals"))
    return root.made(
        lambda: Mix(
            groups=tuple(_group(name, field) for name, field in found["groups"].fields().items()),
            arrivals=_arrivals(found["arrivals"]) if "arrivals" in found else Poisson(),
            rate=_rate(found["rate"]) if "rate" in found else None,
        ),
    )


def _rate(field: Field) -> float:
    if field.number() < 0:
        raise field.refused("must not be negative")
    return field.number()


_PLAIN = ("share", "prompt", "output")
_OPTIONAL = ("tenant", "lane", "priority", "prefix", "turns", "think_s", "arrivals")


def _group(name: str, field: Field) -> RequestClass:
    found = field.record(_PLAIN, _OPTIONAL)
    return field.made(
        lambda: RequestClass(
            name=name,
            share=found["share"].number(),
            prompt=_lengths(found["prompt"]),
            output=_lengths(found["output"]),
            tenant=found["tenant"].text() if "tenant" in found else "",
            lane=found["lane"].lane() if "lane" in found else Lane.INTERACTIVE,
            priority=found["priority"].whole(-(2**31), 2**31 - 1) if "priority" in found else 0,
            prefix=_prefix(found["prefix"]) if "prefix" in found else None,
            turns=_lengths(found["turns"]) if "turns" in found else (1, 1),
            think_s=found["think_s"].number() if "think_s" in found else 0.0,
            arrivals=_arrivals(found["arrivals"]) if "arrivals" in found else None,
        ),
    )


def _prefix(field: Field) -> Prefix:
    found = field.record(("tokens",), ("documents", "zipf"))
    return field.made(
        lambda: Prefix(
            num_tokens=_lengths(found["tokens"]),
            num_documents=found["documents"].whole(1, 1_000_000) if "documents" in found else 1,
            zipf=found["zipf"].number() if "zipf" in found else 1.0,
        ),
    )


def _lengths(field: Field) -> Lengths:
    """Parse a number, a range `[low, high]`, `{median, sigma, min, max}` or `{quantiles: {0: low, ..., 1: high}}`."""
    if isinstance(field.value, list):
        bounds = field.wholes(1, MAX_TOKENS)
        if len(bounds) != 2 or bounds[0] > bounds[1]:
            raise field.refused("must be a range [low, high]")
        return bounds[0], bounds[1]
    if not isinstance(field.value, dict):
        length = field.whole(1, MAX_TOKENS)
        return length, length
    if "quantiles" in field.value:
        return _quantiles(field.record(("quantiles",))["quantiles"])
    found = field.record(("median", "sigma", "min", "max"))
    low, high = (found[key].whole(1, MAX_TOKENS) for key in ("min", "max"))
    return field.made(lambda: LogNormal(found["median"].number(), found["sigma"].number(), low, high))


def _quantiles(field: Field) -> Quantiles:
    field.fields()
    shares = [Field(field.file, field.key, share).number() for share in field.value]
    found = [field.at(share).whole(1, MAX_TOKENS) for share in field.value]
    return field.made(lambda: Quantiles(tuple(zip(shares, found, strict=True))))


def _arrivals(field: Field) -> Arrivals:
    """Parse `poisson`, `constant`, `{bursts: {on_s, off_s, outside}}` or `{batches: {size}}`."""
    if isinstance(field.value, dict) and set(field.value) == {"bursts"}:
        found = field.at("bursts").record(("on_s", "off_s"), ("outside",))
        figures = {key: figure.number() for key, figure in found.items()}
        return field.made(lambda: Bursts(**figures))
    if isinstance(field.value, dict) and set(field.value) == {"batches"}:
        return Batches(field.at("batches").record(("size",))["size"].whole(1, 1_000_000))
    if field.value == "poisson":
        return Poisson()
    if field.value == "constant":
        return Constant()
    raise field.refused("must be poisson, constant, {bursts: ...} or {batches: ...}")
