"""Define what a fuzz target is, find the targets by name, and make mutated inputs without a fuzzer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from tandem.core.errors import ErrorKind, TandemError

_MAX_BYTES = 1 << 16
"""Largest mutated input: larger ones test limits of size, which have tests of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """One reader of foreign bytes, as a fuzz target.

    `read`: takes one input and returns, whatever the input is, or raises one of `errors`; any other exception is a
    defect. `seeds`: inputs that it accepts, from which others are derived. `found`: inputs that once showed a defect.
    """

    read: Callable[[bytes], None]
    seeds: tuple[bytes, ...]
    errors: tuple[type[Exception], ...] = ()
    found: tuple[bytes, ...] = ()

    def check(self, data: bytes) -> None:
        """Read one input. Raises what is a defect: any exception but those in `errors`, and a TandemError that blames
        this program instead of the input."""
        try:
            self.read(data)
        except TandemError as error:
            if error.kind is ErrorKind.INTERNAL:
                raise
        except self.errors:
            pass


class Place(NamedTuple):
    """Where a surface is defined: `module` has it in its dictionary `SURFACES`. `instrumented`: packages besides
    `tandem` whose coverage guides the fuzzer."""

    module: str
    instrumented: tuple[str, ...] = ()


_BODIES = Place("tests.hostile.bodies")
_WORKERS = Place("tests.hostile.worker_messages")
_KV = Place("tests.hostile.kv_messages")
PLACES = {
    "http": Place("tests.hostile.http_bytes", ("uvicorn", "starlette")),
    "sse-readers": Place("tests.hostile.event_streams", ("loadtest",)),
    "sse-writer": Place("tests.hostile.event_streams", ("loadtest",)),
    **dict.fromkeys(("body-fields", "chat-body", "completion-body", "tokenize-body", "grpc-body"), _BODIES),
    "grammar": Place("tests.hostile.grammars", ("llguidance",)),
    "model-output": Place("tests.hostile.model_output"),
    **dict.fromkeys(("gguf", "safetensors", "model-config"), Place("tests.hostile.model_files", ("gguf",))),
    "tenants": Place("tests.hostile.tenants", ("yaml",)),
    **dict.fromkeys(("submission", "worker-call", "watch", "description"), _WORKERS),
    **dict.fromkeys(("handoff", "kv-peer", "kv-request", "call-signature", "rank-message"), _KV),
}
"""All surfaces by name."""


def load(name: str) -> Surface:
    surface: Surface = import_module(PLACES[name].module).SURFACES[name]
    return surface


_TOKENS = (
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\r\n", b"\n", b'"', b"\\ud800", b"{", b"[", b"}", b"]", b":", b",", b"-"),
    *(
        b"null",
        b"true",
        b"NaN",
        b"1e999",
        b"9" * 30,
        b"-1",
        b"0",
        b"\x80" * 10,
        b"\x7f\xff\xff\xff",
        b"%00",
        b"&a",
        b"*a",
    ),
)


def mutants(seeds: Sequence[bytes], count: int) -> Iterator[bytes]:
    """Yield `count` inputs derived from the seeds by random edits, the same ones in every run."""
    chance = random.Random(7)
    for _ in range(count):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.choice((1, 1, 2, 3, 8))):
            _edit(data, seeds, chance)
        yield bytes(data[:_MAX_BYTES])


def _edit(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    start = chance.randrange(len(data) + 1)
    stop = min(len(data), start + chance.choice((1, 1, 2, 4, 8, 64)))
    match chance.randrange(6):
        case 0 if start < len(data):
            data[start] ^= 1 << chance.randrange(8)
        case 1 if start < len(data):
            data[start] = chance.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF))
        case 2:
            del data[start:stop]
        case 3:
            data[start:start] = data[start:stop] * chance.choice((1, 2, 30))
        case 4:
            data[start:stop] = chance.choice(_TOKENS)
        case _:
            other = chance.choice(seeds)
            begin = chance.randrange(len(other) + 1)
            data[start:] = other[begin:]
