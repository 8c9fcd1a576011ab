"""Open a workload: a built-in mix by its name, or a file with a mix or a trace."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path

from tandem.workload import mix
from tandem.workload.mix import Mix
from tandem.workload.mix_file import read_mix
from tandem.workload.scheduled_request import ScheduledRequest
from tandem.workload.trace_reader import replay
from tandem.workload.yaml_field import refused


def open_workload(
    name: str, *, seed: int, count: int | None, rate: float | None, speedup: float = 1.0, salt: str = ""
) -> Iterator[ScheduledRequest]:
    """Open a mix or a trace and return an iterator over its requests, in order of due time.

    `name`: name of a built-in mix, or path of a mix (*.yaml) or of a trace. `seed`: seed of the requests, which are
    generated one at a time. `count`: number of requests, not counting later turns of conversations; None: all, which is
    without end for a mix. `rate`: requests per second, in place of a mix's own rate. `speedup`: number by which the
    times of a trace are divided. `salt`: another salt changes only the tokens of prompts, so that a prefix cache does
    not hold them.

    Raises TandemError(INVALID_REQUEST) for arguments or files that cannot be used. For a bad line of a trace, it is
    raised when the iterator reaches the line."""
    if count is not None and count < 1:
        raise refused(name, f"count must be at least 1, got {count}")
    named_mix = _mix(name)
    if named_mix is None:
        if rate is not None:
            raise refused(name, "a trace has its own times; give a speed-up, not a rate")
        if not 0 < speedup < float("inf"):
            raise refused(name, f"a speed-up must be above 0, got {speedup}")
        return replay(Path(name), seed, count, speedup, salt)
    if speedup != 1:
        raise refused(name, "a mix has no times of its own; give a rate, not a speed-up")
    try:
        return mix.scheduled_requests(named_mix, seed, count, rate, salt)
    except ValueError as error:
        raise refused(name, str(error)) from error


def built_in_names() -> tuple[str, ...]:
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in _MIXES.iterdir()))


def built_in(name: str) -> Mix:
    """Return the built-in mix with the name `name`, one of those that `built_in_names` lists."""
    with as_file(_MIXES / f"{name}.yaml") as path:
        return read_mix(path)


_MIXES = files("tandem.workload") / "mixes"


def _mix(name: str) -> Mix | None:
    """Return the mix of this name; None when it names a trace."""
    if Path(name).suffix in (".yaml", ".yml"):
        return read_mix(Path(name))
    if name in built_in_names():
        return built_in(name)
    if Path(name).exists():
        return None
    raise refused(name, f"there is no such file or built-in mix; built in are {', '.join(built_in_names())}")
