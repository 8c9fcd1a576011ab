"""Parse the tenants file (YAML): tenants, their settings, and the hashes of their API keys.

Unknown, missing and impossible values are refused with file and place; a key that was written in plain text by mistake
is not repeated in errors.

    defaults:                     # of every tenant below, unless it sets its own; not for `operator` and `proxy`
      requests_per_minute: 60
    tenants:
      acme:
        keys:
          - {hash: "sha256:...", label: laptop, expires: 2027-01-31}
        models: [llama-3.1-8b]
        tokens_per_minute: 100000

`admission.tenant.Tenant` explains the settings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, get_args

import yaml

from tandem.admission.api_keys import parse_hash
from tandem.admission.quota import MAX_LIMIT
from tandem.admission.tenant import Tenant
from tandem.core.config import Disaggregation
from tandem.core.ids import OPEN_TENANT, TenantId
from tandem.core.lane import Lane
from tandem.core.request import MAX_COUNT
from tandem.workload.yaml_field import Field, StrictLoader, refused

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LANES = {lane.label: lane for lane in Lane}
_COUNTS = {
    "requests_per_minute": MAX_LIMIT,
    "tokens_per_minute": MAX_LIMIT,
    "max_concurrency": MAX_COUNT,
    "max_prompt_tokens": MAX_COUNT,
    "max_retained_tokens": MAX_COUNT,
}
_POWERS = ("operator", "proxy")
"""Settings that give a tenant power over the others, so that each tenant has to set them itself."""
_SETTINGS = (*_COUNTS, "models", "lane", "weight", "cache_sharing", "disaggregation", *_POWERS)


@dataclass(frozen=True, slots=True)
class Key:
    """Describe one API key. `digest`: the SHA-256 digest of the key. `tenant`: the tenant that owns it.

    `label`: a name for people. `expires_ns`: nanoseconds since the epoch; None where the key does not expire.
    """

    digest: bytes
    tenant: Tenant
    label: str
    expires_ns: int | None


@dataclass(frozen=True, slots=True)
class Tenants:
    """Content of a tenants file: its tenants by id, and its keys by their SHA-256 digest."""

    keys: Mapping[bytes, Key]
    tenants: Mapping[TenantId, Tenant]


def parse_tenants(text: str, file: str) -> Tenants:
    """Parse the text of a tenants file and return its tenants and keys; `file` is the name of the file in errors.

    Raises TandemError(INVALID_REQUEST) naming the place of an unknown, missing or impossible value, or of a key that
    occurs twice."""
    try:
        value = yaml.load(text, StrictLoader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        # Without the text at the error: it may be a key.
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark is not None else file
        raise refused(where, f"is no YAML: {getattr(error, 'problem', None) or type(error).__name__}") from None
    found = Field(file, "", value).record(("tenants",), ("defaults",))
    defaults = found["defaults"].record((), _SETTINGS) if "defaults" in found else {}
    for name in _POWERS:
        if name in defaults:
            raise refused(defaults[name].place, "cannot be a default: set it at each tenant that needs it")
    keys: dict[bytes, Key] = {}
    tenants: dict[TenantId, Tenant] = {}
    for name, field in found["tenants"].fields().items():
        tenant = _tenant(name, field, defaults)
        tenants[tenant.id] = tenant
        for digest, key in _keys(field.at("keys"), tenant).items():
            if digest in keys:
                raise refused(field.place, f"a key of this tenant is also one of {keys[digest].tenant.id}")
            keys[digest] = key
    return Tenants(keys, tenants)


def _tenant(name: str, field: Field, defaults: Mapping[str, Field]) -> Tenant:
    if not _NAME.fullmatch(name) or name == OPEN_TENANT:
        raise refused(
            field.place, f"a tenant's name is 1 to 64 letters, digits, '.', '_' or '-', and not {OPEN_TENANT}"
        )
    own = field.record(("keys",), _SETTINGS)
    del own["keys"]
    settings: dict[str, Any] = {key: _setting(key, value) for key, value in {**defaults, **own}.items()}
    return Tenant(id=TenantId(name), **settings)


def _setting(name: str, field: Field) -> Any:
    match name:
        case "models":
            return _models(field)
        case "lane":
            return _LANES[_choice(field, tuple(_LANES))]
        case "weight":
            if not 0 < field.number() <= 1000 or not math.isfinite(1 / field.number()):
                raise field.refused("must be more than 0 and at most 1000")
            return field.number()
        case "cache_sharing":
            return _choice(field, ("private", "public"))
        case "disaggregation":
            # YAML reads a bare `off` as false.
            return "off" if field.value is False else _choice(field, get_args(Disaggregation))
        case "operator" | "proxy":
            if not isinstance(field.value, bool):
                raise field.refused("must be true or false")
            return field.value
        case _:
            return field.whole(0, _COUNTS[name])


def _models(field: Field) -> frozenset[str]:
    if not isinstance(field.value, list) or not all(isinstance(model, str) and model for model in field.value):
        raise field.refused("must be a list of model names")
    return frozenset(field.value)


def _choice(field: Field, allowed: tuple[str, ...]) -> str:
    if field.text() not in allowed:
        raise field.refused(f"must be one of {', '.join(allowed)}")
    return field.text()


def _keys(field: Field, tenant: Tenant) -> dict[bytes, Key]:
    """Return a tenant's keys by digest. With an empty list nobody can authenticate as this tenant."""
    if not isinstance(field.value, list):
        raise refused(field.place, "must be a list of keys")
    found: dict[bytes, Key] = {}
    for index, value in enumerate(field.value):
        place = Field(field.file, f"{field.key}[{index}]", value)
        if not isinstance(value, dict):
            raise refused(place.place, "must be a mapping with a hash")
        parts = place.record(("hash",), ("label", "expires"))
        written = parts["hash"]
        if not isinstance(written.value, str):
            raise refused(written.place, "must be text")
        digest = written.made(lambda written=written: parse_hash(written.value))  # type: ignore[misc]
        if digest in found:
            raise refused(place.place, "occurs twice")
        label = parts["label"].text() if "label" in parts else ""
        found[digest] = Key(digest, tenant, label, _expiry(parts["expires"]) if "expires" in parts else None)
    return found


def _expiry(field: Field) -> int:
    """Return an expiry in nanoseconds since the epoch: a time, or the beginning of a date; UTC where it names no
    zone."""
    value = field.value
    if isinstance(value, str):
        value = field.made(lambda: datetime.fromisoformat(field.value))
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise field.refused("must be a date or a time, as 2027-01-31 or 2027-01-31T12:00:00Z")
    moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return int(moment.timestamp()) * 10**9
