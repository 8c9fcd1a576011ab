"""Refuses to serve the world by accident; never serves anybody itself.

Without keys only this machine may reach a gateway, unless somebody says that everybody may.
"""

from __future__ import annotations

from pathlib import Path

from tandem.core.addresses import is_loopback
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import DEFAULT_LAYER, Resolved
from tandem.gateway.tenants.tenants_watch import read_tenants


def require_auth_if_public(resolved: Resolved) -> None:
    """Raises TandemError(INVALID_REQUEST): before anything is started, and naming what to say instead."""
    config = resolved.config.gateway
    if config.auth == "keys":
        if not config.tenants:
            message = (
                "gateway.auth is keys: name the file of tenants with --tenants, or serve everybody with --auth off"
            )
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="gateway.tenants")
        read_tenants(Path(config.tenants), config.disaggregation)
        return
    if config.tenants:
        message = "gateway.tenants is for gateway.auth=keys, and that is off: say --auth keys"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="gateway.auth")
    if resolved.origins["gateway.auth"] == DEFAULT_LAYER and not is_loopback(config.host):
        message = (
            f"gateway.host is {config.host}, which others can reach: ask for keys with --auth keys --tenants FILE, "
            "or serve everybody with --auth off"
        )
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="gateway.auth")
