"""Check the authentication settings as a gateway and a worker would at their start, and the file of the cluster's
secret, without printing the secret.

The caller passes the programs' own checks, which raise TandemError with the flags to set.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.core.addresses import is_loopback
from tandem.core.config import Config
from tandem.core.errors import TandemError
from tandem.core.settings import DEFAULT_LAYER, Resolved
from tandem.doctor.finding import Finding, fail, ok, skip, warn
from tandem.wire.secret_file import SecretFile, parse_secrets

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


@dataclass(frozen=True, slots=True)
class SecretFacts:
    """State of the secret file. `problem`: why it cannot be used, else empty. `mode`: permission bits of the file."""

    path: str
    problem: str = ""
    num_secrets: int = 0
    mode: int = 0o600


def read_secret(path: str) -> SecretFacts | None:
    """Read the file's state; returns None if no file is set."""
    if not path:
        return None
    try:
        SecretFile(Path(path))
        num_secrets = len(parse_secrets(Path(path).read_bytes(), path))
        return SecretFacts(path, "", num_secrets, stat.S_IMODE(Path(path).stat().st_mode))
    except TandemError as error:
        return SecretFacts(path, error.message)
    except OSError as error:
        return SecretFacts(path, f"cluster.secret_file: cannot read {path}: {error.strerror}")


def judge_secret(facts: SecretFacts | None, config: Config) -> Finding:
    if facts is None:
        return _judge_no_secret(config)
    if facts.problem:
        fix = f"`openssl rand -hex 32 > {facts.path}`, one for all; in a pod `cluster.existingSecret` (key `secret`)"
        return fail("secret", facts.problem, fix)
    summary = f"{facts.path} holds {facts.num_secrets} secret{'s' * (facts.num_secrets > 1)}"
    if facts.mode & stat.S_IROTH:
        fix = f"`chmod 600 {facts.path}`; of a mounted Secret `defaultMode: 0440` with the pod's `fsGroup`"
        return warn("secret", f"{summary}, and every user of this machine can read it (mode {facts.mode:04o})", fix)
    return ok("secret", f"{summary}, mode {facts.mode:04o}")


def _judge_no_secret(config: Config) -> Finding:
    if is_loopback(config.worker.host) or config.cluster.has_tls:
        return skip("secret", "cluster.secret_file is empty: `serve` generates a secret, and hosts are loopback")
    fix = "`openssl rand -hex 32 > secret`, and --secret-file secret for gateways and workers alike"
    if config.cluster.insecure:
        summary = f"cluster.insecure: anybody who can reach {config.worker.host} may use its workers"
        return warn("secret", summary, fix)
    return fail("secret", f"worker.host is {config.worker.host}, which others can reach, without a secret or TLS", fix)
