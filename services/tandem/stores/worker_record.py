"""Define the record that a worker publishes in the registry, and its JSON form.

Load figures are not part of it; gateways get these from the worker itself.
"""

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
    """Hold the description of one worker process for gateways: its identity, what it serves and where it runs.

    - `pool`: the role (prefill, decode or mixed) with which it was started. `role`: the role that an operator or
      planner has set for this incarnation, empty if none; the registry stores it separately.
    - `model`: name of the model that it serves. `max_model_len`: the most tokens of prompt and output together.
      `layout`: the KV layout as text for operators.
    - `fingerprint`: hash over weights, precision, tokenizer and block size. `bundle_digest`: hash over the tokenizer
      files. Both are hexadecimal.
    - `topology`: host, rack and zone. `lanes`: labels of the lanes whose requests gateways place on it, empty for all.
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
    lanes: tuple[str, ...] = ()

    @property
    def effective_role(self) -> str:
        """Return the role by which routers use this worker: `role`, or `pool` where that is empty."""
        return self.role or self.pool

    def to_json(self) -> str:
        """Return the stored form of the record: one flat object, without `role`, and without `host`, `rack`, `zone` and
        `lanes` where they are empty.
        """
        flat = asdict(self)
        worker = flat.pop("worker")
        labels = {name: label for name, label in flat.pop("topology").items() if label}
        labels |= {"lanes": lanes} if (lanes := flat.pop("lanes")) else {}
        del flat["role"]
        return msgspec.json.encode({"schema": SCHEMA, **worker, **flat, **labels}).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerRecord:
        """Parse a stored record, whose `role` is then empty. Raises ValueError where this version cannot read it."""
        flat = decode_record(text, dict[str, Any], SCHEMA)
        try:
            return msgspec.convert({**flat, "worker": flat, "topology": flat, "role": ""}, cls)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
