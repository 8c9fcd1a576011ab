"""Define the record that a worker publishes in the registry, and its JSON form. It has no load figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from tandem.core.config import Count
from tandem.core.ids import WorkerRef
from tandem.core.topology import Topology
from tandem.stores.json_record import decode_record

SCHEMA = 1
"""Version of the record format; increase it when a field changes its meaning or is removed. A new field needs no
increase, since readers skip unknown fields."""


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
    max_model_len: Count
    bundle_digest: str
    role: str = ""
    topology: Topology = field(default_factory=Topology)

    @property
    def effective_role(self) -> str:
        """The role by which routers use this worker: `role`, or else `pool`."""
        return self.role or self.pool

    def to_json(self) -> str:
        """Return the record as one flat object, in which `host`, `rack` and `zone` are missing where they are empty."""
        flat = asdict(self)
        worker = flat.pop("worker")
        labels = {name: label for name, label in flat.pop("topology").items() if label}
        del flat["role"]
        return msgspec.json.encode({"schema": SCHEMA, **worker, **flat, **labels}).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerRecord:
        """Parse a stored record. Raises ValueError."""
        flat = decode_record(text, dict[str, Any], SCHEMA)
        try:
            return msgspec.convert({**flat, "worker": flat, "topology": flat, "role": ""}, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
