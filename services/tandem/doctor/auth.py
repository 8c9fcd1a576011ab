"""Check the authentication settings as a gateway and a worker would at their start.

The caller passes the programs' own checks, which raise TandemError with the flags to set.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.core.errors import TandemError
from tandem.core.settings import DEFAULT_LAYER, Resolved
from tandem.doctor.finding import Finding, fail, ok, skip

AuthCheck = Callable[[Resolved], None]


def read_auth_problem(check: AuthCheck, resolved: Resolved) -> str:
    """Return why a program with these settings would refuse to start; empty if it would start."""
    try:
        check(resolved)
    except TandemError as error:
        return error.message
    return ""


def judge_tenants(problem: str, resolved: Resolved) -> Finding:
    gateway = resolved.config.gateway
    if not gateway.tenants and resolved.origins["gateway.auth"] == DEFAULT_LAYER and gateway.auth == "keys":
        return skip("tenants", "no tenants file is set: `serve` needs no keys, `gateway` needs --tenants")
    if not problem:
        return ok(
            "tenants",
            f"{gateway.tenants} is valid" if gateway.tenants else "gateway.auth is off: requests need no keys",
        )
    fix = (
        "--tenants FILE: docs/tenants.md describes it, `tandem key` generates a key and its hash; in a pod "
        "`tenants.existingSecret` or `tenants.content`"
    )
    return fail("tenants", problem, fix)


def judge_guard(problem: str) -> Finding:
    if not problem:
        return ok("guard", "a worker with these settings accepts calls only from its own cluster")
    return fail("guard", problem, "--secret-file FILE (`openssl rand -hex 32`), or a loopback address as worker.host")
