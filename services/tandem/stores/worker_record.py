"""Define the record that a worker publishes in the registry, and its JSON form. It has no load figures."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.topology import Topology

SCHEMA = 1
"""Version of the record format; increase it when a field changes its meaning or is removed. A new field needs no
increase, since readers skip unknown fields."""

_LABELS = ("host", "rack", "zone")


class RecordError(Exception):
    """The stored record cannot be read by this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """Identity, pool and model of one worker process.

    `pool`: the pool (prefill, decode or mixed) with which the worker was started. `role`: the role that an operator or
    planner set for this incarnation, empty if none; the registry stores it beside the record's JSON. `fingerprint` and
    `bundle_digest`: hexadecimal digests. `layout`: KV layout as text for operators; workers compare the exact layout in
    their handshake.
    """

    worker: WorkerRef
    pool: str
    model: str
    fingerprint: str
    layout: str
    max_model_len: int
    bundle_digest: str
    role: str = ""
    topology: Topology = field(default_factory=Topology)

    @property
    def effective_role(self) -> str:
        """The role by which routers use this worker: `role`, or else `pool`."""
        return self.role or self.pool

    def to_json(self) -> str:
        return json.dumps(
            {
                "schema": SCHEMA,
                "id": self.worker.id,
                "incarnation": self.worker.incarnation,
                "address": self.worker.address,
                "pool": self.pool,
                "model": self.model,
                "fingerprint": self.fingerprint,
                "layout": self.layout,
                "max_model_len": self.max_model_len,
                "bundle_digest": self.bundle_digest,
                **{name: getattr(self.topology, name) for name in _LABELS if getattr(self.topology, name)},
            },
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerRecord:
        """Parse a stored record. Raises RecordError."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise RecordError(f"not JSON: {error}") from None
        if not isinstance(content, dict) or _count(content, "schema") != SCHEMA:
            raise RecordError(f"not a worker record of schema {SCHEMA}")
        worker = WorkerRef(
            WorkerId(_text(content, "id")), Incarnation(_count(content, "incarnation")), _text(content, "address")
        )
        return cls(
            worker=worker,
            pool=_text(content, "pool"),
            model=_text(content, "model"),
            fingerprint=_text(content, "fingerprint"),
            layout=_text(content, "layout"),
            max_model_len=_count(content, "max_model_len"),
            bundle_digest=_text(content, "bundle_digest"),
            topology=Topology(**{name: _text(content, name) for name in _LABELS if name in content}),
        )


def _text(content: dict[str, Any], name: str) -> str:
    value = content.get(name)
    if not isinstance(value, str):
        raise RecordError(f"{name} is not text: {value!r}")
    return value


def _count(content: dict[str, Any], name: str) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RecordError(f"{name} is not a count: {value!r}")
    return value
