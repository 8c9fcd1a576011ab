"""Define the record that a worker publishes in the registry, and its JSON form. It has no load figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import msgspec

from tandem.core.config import Count
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.topology import Topology
from tandem.stores.json_record import decode_record

SCHEMA = 1
"""Version of the record format; increase it when a field changes its meaning or is removed. A new field needs no
increase, since readers skip unknown fields."""

_SHARED = ("pool", "model", "fingerprint", "layout", "max_model_len", "bundle_digest")


class _Stored(msgspec.Struct, kw_only=True, omit_defaults=True):
    """JSON form of a record, in which `host`, `rack` and `zone` are missing where the topology has no such label."""

    schema: int
    id: str
    incarnation: Count
    address: str
    pool: str
    model: str
    fingerprint: str
    layout: str
    max_model_len: Count
    bundle_digest: str
    host: str = ""
    rack: str = ""
    zone: str = ""


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
        shared = {name: getattr(self, name) for name in _SHARED}
        stored = _Stored(schema=SCHEMA, **asdict(self.worker), **asdict(self.topology), **shared)
        return msgspec.json.encode(stored).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerRecord:
        """Parse a stored record. Raises ValueError."""
        stored = decode_record(text, _Stored, SCHEMA)
        worker = WorkerRef(WorkerId(stored.id), Incarnation(stored.incarnation), stored.address)
        topology = Topology(stored.host, stored.rack, stored.zone)
        return cls(worker=worker, topology=topology, **{name: getattr(stored, name) for name in _SHARED})
