"""Fuzz one surface, guided by coverage: `python -m tests.hostile.fuzz TARGET --seconds 600`.

Needs `atheris`. Ends with exit code 0 after the given time; a defect, an input that takes more than `HANG_S`, or memory
that grows by more than `GROWTH_MB` ends it at once with another exit code, and the input is written to the folder of
`--inputs`, where a later run finds it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path

import atheris

from tests.hostile.surface import PLACES

HANG_S = 10
GROWTH_MB = 512


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tests.hostile.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(PLACES))
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--inputs", type=Path, help="folder that keeps the inputs of earlier runs (default: none)")
    args = parser.parse_args(argv)
    place = PLACES[args.target]
    with atheris.instrument_imports(include=["tandem", *place.instrumented]):
        # By name and not by `load`, which would find modules that were imported without being instrumented.
        surface = __import__(place.module, fromlist=["SURFACES"]).SURFACES[args.target]
    logging.disable(logging.CRITICAL)
    for data in (*surface.seeds, *surface.found):
        surface.check(data)
    inputs = args.inputs or Path(tempfile.mkdtemp(prefix="tandem-fuzz-"))
    inputs.mkdir(parents=True, exist_ok=True)
    for data in surface.seeds:
        (inputs / sha1(data).hexdigest()).write_bytes(data)

    def check(data: bytes) -> None:
        try:
            surface.check(data)
        except BaseException:
            # libFuzzer writes it too, unless its own watchdog ends a slow report.
            (inputs / f"defect-{sha1(data).hexdigest()}").write_bytes(data)
            raise

    flags = [
        f"-max_total_time={args.seconds}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={_resident_mb() + GROWTH_MB}",
        f"-artifact_prefix={inputs}/",
        "-max_len=16384",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    atheris.Setup([sys.argv[0], *flags, str(inputs)], check)
    atheris.Fuzz()


def _resident_mb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) >> 10


if __name__ == "__main__":
    # libFuzzer limits the largest size since the fork, which may be that of a large process that started this one.
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    main()
