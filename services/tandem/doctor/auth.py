"""Check the authentication settings as a gateway and a worker would at their start, and the file of the cluster's
secret, without printing the secret.

The caller passes the programs' own checks, which raise TandemError with the flags to set.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from tandem.core.addresses import is_loopback
from tandem.core.config import Config
from tandem.core.errors import TandemError
from tandem.core.settings import DEFAULT_LAYER, Resolved
from tandem.doctor.finding import Finding, fail, ok, skip, warn
from tandem.wire.secret_file import SecretFile

AuthCheck = Callable[[Resolved], object]
_IN_DOCS = "(docs/tenants.md lists its fields, `tandem key` generates a key and its hash); in a pod"
_CORRECT_TENANTS = f"create or correct that file {_IN_DOCS} it is `tenants.existingSecret` or `tenants.content`"
_SET_TENANTS = f"set --tenants FILE {_IN_DOCS} set `tenants.existingSecret` or `tenants.content`"


def check_tenants(check: AuthCheck, resolved: Resolved) -> Finding:
    gateway = resolved.config.gateway
    if not gateway.tenants and resolved.origins["gateway.auth"] == DEFAULT_LAYER and gateway.auth == "keys":
        return skip("tenants", "no tenants file is set: `serve` needs no keys, `gateway` needs --tenants")
    try:
        check(resolved)
    except TandemError as error:
        is_used = gateway.tenants and gateway.auth == "keys"
        return fail("tenants", error.message, _CORRECT_TENANTS if is_used else _SET_TENANTS)
    return ok(
        "tenants", f"{gateway.tenants} is valid" if gateway.tenants else "gateway.auth is off: requests need no keys"
    )


def check_guard(check: AuthCheck, resolved: Resolved) -> Finding:
    try:
        check(resolved)
    except TandemError as error:
        fix = "set --secret-file FILE (`openssl rand -hex 32 > FILE`), or a loopback address as worker.host"
        return fail("guard", error.message, fix)
    return ok("guard", "a worker with these settings accepts calls only from its own cluster")


def check_secret(config: Config) -> Finding:
    path = config.cluster.secret_file
    if not path:
        return _judge_no_secret(config)
    try:
        num_secrets = len(SecretFile(Path(path)).current(0.0))
        mode = stat.S_IMODE(Path(path).stat().st_mode)
    except TandemError as error:
        fix = f"run `openssl rand -hex 32 > {path}`, once for all; in a pod set `cluster.existingSecret` (key `secret`)"
        return fail("secret", error.message, fix)
    summary = f"{path} holds {num_secrets} secret{'s' * (num_secrets > 1)}"
    if mode & stat.S_IROTH:
        fix = f"run `chmod 600 {path}`; for a mounted Secret set `defaultMode: 0440` and the pod's `fsGroup`"
        return warn("secret", f"{summary}, which every user of this machine can read and use (mode {mode:04o})", fix)
    return ok("secret", f"{summary}, mode {mode:04o}")


def _judge_no_secret(config: Config) -> Finding:
    if is_loopback(config.worker.host) or config.cluster.has_tls:
        return skip(
            "secret",
            "cluster.secret_file is empty, as it may be on loopback addresses or with TLS; `serve` generates one",
        )
    fix = "run `openssl rand -hex 32 > secret`, and set --secret-file secret for gateways and workers alike"
    if config.cluster.insecure:
        summary = f"cluster.insecure is set: anybody who can reach {config.worker.host} may use its workers"
        return warn("secret", summary, fix)
    summary = (
        f"worker.host is {config.worker.host}, without a secret or TLS: anybody who can reach it may use its workers"
    )
    return fail("secret", summary, fix)
