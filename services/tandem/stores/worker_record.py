"""What a worker says of itself in the registry, and its form as JSON; never says how full the worker is."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.topology import Topology

SCHEMA = 1
"""Rises when a field changes its meaning or goes. Fields may be added without: readers skip what they don't know."""

_LABELS = ("host", "rack", "zone")


class RecordError(Exception):
    """A stored record that this version cannot read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """`pool` is a label for routers, `role` one that was set for this life from outside, empty where none was: the
    registry keeps it beside the record's text. `fingerprint` and `bundle_digest` are hexadecimal digests; `layout` is
    for people to read: partners compare the real one in their handshake."""

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
        """What routers take this worker for."""
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
        """Raises RecordError."""
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
