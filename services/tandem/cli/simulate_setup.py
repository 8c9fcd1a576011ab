"""Build machines, workloads and limits from the flags of `tandem simulate` and `tandem plan`."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from tandem.admission.tenant import Tenant
from tandem.cli.simulate_flags import SECTIONS
from tandem.core.config import value_of
from tandem.core.errors import invalid_request
from tandem.core.ids import TenantId
from tandem.core.near_name import near_name
from tandem.core.settings import DEFAULT_LAYER, Resolved, resolve
from tandem.core.slo import parse_time
from tandem.gateway.tenants.tenants_file import parse_tenants
from tandem.sim.cost.hardware import HARDWARE
from tandem.sim.cost.model_shapes import SHAPES
from tandem.sim.cost.roofline import SERVING, Efficiency, Roofline
from tandem.sim.machines.machine import Machine, profile_machine, roofline_machine
from tandem.sim.machines.profile import Profile, decode_profile
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.source import built_in_names, open_workload

COUNT = 1000
"""Default number of requests of a mix, which has no end of its own."""
_EFFICIENCIES = {"memory": "memory", "compute": "compute", "link": "link", "overhead": "overhead_s", "sum": "sum_s"}
"""Fields of `Efficiency` by the names that --efficiency has for them; those that end in `_s` are times."""

_VARIANT = re.compile(r"(-(instruct|it|chat|base))?(-v\d[\d.]*|-\d{4})?$")
"""What follows the name of a model's shape in the name of a variant with that shape: its tuning, and a version."""
_OWN = ("num_threads", "kv_cache_memory")

Value = TypeVar("Value")


def machines(resolved: Resolved, args: argparse.Namespace) -> tuple[list[Machine], Resolved]:
    """Return the machines that the flags name, and the settings to simulate with. A machine models the speed of a
    worker.

    With `--profile` there is one machine, and the settings with which its profile was measured replace the defaults.
    Raises TandemError(INVALID_REQUEST) for unknown names and for flags that contradict each other."""
    if args.price is not None and not 0 <= args.price < float("inf"):
        raise invalid_request(f"--price {args.price} must be 0 or more")
    if args.profile is None:
        return [_roofline(args, name.strip()) for name in args.hardware.split(",")], resolved
    profile = decode_profile(_text_of("--profile", args.profile), args.profile)
    given = {key: value_of(resolved.config, key) for key, name in resolved.origins.items() if name != DEFAULT_LAYER}
    settled = resolve([(DEFAULT_LAYER, _measured(profile, args.profile)), ("given", given)])
    return [profile_machine(profile, args.price or 0.0)], settled


def _measured(profile: Profile, name: str) -> dict[str, dict[str, Any]]:
    """Return the settings with which the workers of a profile were measured, which must be equal for all of them.

    Threads and memory may differ between workers, since their effect is in the measurements already.
    """
    found = [
        {section: {k: v for k, v in values.items() if k not in _OWN} for section, values in worker.settings.items()}
        for worker in profile.workers.values()
    ]
    if any(values != found[0] for values in found):
        raise invalid_request(f"the workers of --profile {name} ran with different settings: fit one profile for each")
    return {section: values for section, values in found[0].items() if section in SECTIONS}


def _roofline(args: argparse.Namespace, hardware: str) -> Machine:
    kind = known("--hardware", hardware, HARDWARE, hardware.lower())
    if args.price is not None:
        kind = replace(kind, price_per_hour=args.price, price_provenance="as given by --price")
    shape = known("--model", args.shape, SHAPES, _shape_name(args.shape))
    try:
        return roofline_machine(Roofline(shape, kind, 1, efficiency(args.efficiency), args.weights, args.kv))
    except ValueError as error:
        raise invalid_request(str(error)) from error


def _shape_name(name: str) -> str:
    """Return the name in `SHAPES` of a model that may be named as on Hugging Face: without its organisation, tuning and
    version, in lower case. What else follows, such as a quantization, stays and makes the name unknown."""
    return _VARIANT.sub("", name.rpartition("/")[2].lower())


def efficiency(text: str) -> Efficiency:
    """Return the default efficiency `SERVING` with the changes that `text` lists, such as `memory=0.85,overhead=2ms`.

    Raises TandemError(INVALID_REQUEST) for an unknown name or a value out of range."""
    changed: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        field = known("--efficiency", name, _EFFICIENCIES)
        try:
            changed[field] = parse_time(value, f"--efficiency {part}") if field.endswith("_s") else float(value)
        except ValueError:
            raise invalid_request(f"--efficiency {part}: {value!r} is not a number") from None
    try:
        return replace(SERVING, **changed)
    except ValueError as error:
        raise invalid_request(f"--efficiency {text}: {error}") from error


def link_bandwidth(args: argparse.Namespace) -> float | None:
    """Return the bandwidth that `--link` gives, in bytes per second for each GPU; None if it is to be the hardware's
    default.

    Raises TandemError(INVALID_REQUEST) if it is not above 0."""
    if args.link is None:
        return None
    if not 0 < args.link < float("inf"):
        raise invalid_request(f"--link {args.link} must be more than 0")
    return float(args.link) * 1e9


def kv_bytes(resolved: Resolved) -> int | None:
    """Return the size of the KV cache in bytes if a setting gives it; None means all memory that the weights leave."""
    is_set = resolved.origins["engine.kv_cache_memory"] != DEFAULT_LAYER
    return int(resolved.config.engine.kv_cache_memory) if is_set else None


def count_of(args: argparse.Namespace) -> int | None:
    """Return the number of requests to simulate; None for all requests of a trace.

    Raises TandemError(INVALID_REQUEST) if `--count` is below 1."""
    if args.count is not None and args.count < 1:
        raise invalid_request(f"--count {args.count} must be at least 1")
    is_mix = args.workload in built_in_names() or Path(args.workload).suffix in (".yaml", ".yml")
    return COUNT if args.count is None and is_mix else args.count


def workload_requests(args: argparse.Namespace, count: int | None, seed: int) -> Iterator[ScheduledRequest]:
    """Return the requests of the mix or trace that the flags name, in order of due time, generated one at a time.

    `count`: how many, None for all. Raises TandemError(INVALID_REQUEST) as `open_workload` does."""
    return open_workload(args.workload, seed=seed, count=count, rate=args.rate, speedup=args.speedup)


def tenants(resolved: Resolved) -> Mapping[TenantId, Tenant] | None:
    """Return the tenants of the gateway's tenants file by id, without their keys; None if no file is set.

    Raises TandemError(INVALID_REQUEST) if the file cannot be read or parsed."""
    file = resolved.config.gateway.tenants
    return parse_tenants(_text_of("--tenants", file), file).tenants if file else None


def known(flag: str, name: str, table: Mapping[str, Value], key: str | None = None) -> Value:
    """Return the value that `table` has for a name given on the command line.

    `flag`: the flag that gave the name. `name`: the name as it was given. `key`: the name to look up in `table` in its
    place; None: `name` itself. Raises TandemError(INVALID_REQUEST) that lists the known names if the table has no such
    name."""
    key = name if key is None else key
    if key in table:
        return table[key]
    nearest = near_name(key, table)
    hint = f"; did you mean {nearest}?" if nearest else ""
    raise invalid_request(f"{flag} {name} is not known; known are {', '.join(table)}{hint}")


def _text_of(flag: str, name: str) -> str:
    try:
        return Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise invalid_request(f"cannot read {flag} {name}: {getattr(error, 'strerror', None) or error}") from error


def writable(flag: str, name: str | None) -> Path | None:
    """Return the path of the output file `name` of the flag `flag`; None if no file is given.

    Raises TandemError(INVALID_REQUEST) if it cannot be written, so that a long run does not fail at its end."""
    if name is None:
        return None
    path = Path(name)
    if not path.resolve().parent.is_dir() or path.is_dir():
        raise invalid_request(f"cannot write {flag} {name}: its directory does not exist, or it is a directory")
    try:
        # A file that exists is not opened, because it may be a pipe, whose reader would see its end.
        if not path.exists():
            made = path.resolve()  # a link to a file that does not exist yet is kept
            made.touch()
            made.unlink()
        elif not os.access(path, os.W_OK):
            raise invalid_request(f"cannot write {flag} {name}: this user may not write it")
    except OSError as error:
        raise invalid_request(f"cannot write {flag} {name}: {error.strerror}") from error
    return path


def chart_path(args: argparse.Namespace) -> Path | None:
    """Return the path of the chart that `--chart` gives; None if no chart is requested.

    Imports matplotlib, so that its absence is an error before a long run and not after it. Raises TandemError if the
    chart cannot be drawn to that path."""
    path = writable("--chart", args.chart)
    if path is not None:
        import_module("tandem.sim.report.chart").require_drawable(path)
    return path


def workload_document(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the workload's flags by name, for the file that `--json` writes."""
    return {name: getattr(args, name) for name in ("workload", "seed", "count", "rate", "speedup")}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a document to the file of `--json`. Raises TandemError(INVALID_REQUEST) if that fails."""
    try:
        path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise invalid_request(f"cannot write --json {path}: {error.strerror}") from error
