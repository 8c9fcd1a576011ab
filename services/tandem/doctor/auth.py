"""What keeps strangers out, as a gateway and a worker would judge it at their start; never opens a port.

The judgement is the programs' own, and comes from outside: each of `gateway` and `worker` raises TandemError with what
to say instead.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.errors import TandemError
from tandem.core.settings import DEFAULT_LAYER, Resolved
from tandem.doctor.finding import Finding, fail, ok, skip

Door = Callable[[Resolved], None]


def read_door(door: Door, resolved: Resolved) -> str:
    """Why a program with these settings would not start; empty where it would."""
    try:
        door(resolved)
    except TandemError as error:
        return error.message
    return ""


def judge_tenants(problem: str, resolved: Resolved) -> Finding:
    gateway = resolved.config.gateway
    if not gateway.tenants and resolved.origins["gateway.auth"] == DEFAULT_LAYER and gateway.auth == "keys":
        return skip("tenants", "no file of tenants is named: `serve` asks for no keys, a gateway alone wants --tenants")
    if not problem:
        return ok(
            "tenants",
            f"{gateway.tenants} is taken" if gateway.tenants else "gateway.auth is off: no keys are asked for",
        )
    fix = (
        "--tenants FILE: docs/tenants.md says what it holds, `tandem key` draws a key and its hash; in a pod "
        "`tenants.existingSecret` or `tenants.content`"
    )
    return fail("tenants", problem, fix)


def judge_guard(problem: str) -> Finding:
    if not problem:
        return ok("guard", "a worker with these settings lets its own cluster in and nobody else")
    return fail("guard", problem, "--secret-file FILE (`openssl rand -hex 32`), or a worker.host of this machine alone")
