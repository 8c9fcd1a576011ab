"""Define the systems that a bench compares: servers reached over HTTP, and programs that run a batch of requests."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import msgspec

from loadtest.client.endpoint import ANSWER_TOKENS, Endpoint, NoEndpoint, base_url, first_model
from loadtest.client.open_loop import run_workload
from loadtest.client.records import Record, Run, decode_run, encode
from loadtest.client.workloads import Workload, warm_up
from loadtest.peers.catalog import Settings, is_installed, python_of, server_command
from loadtest.processes.systems import ServerCommand, SystemServer, running_server
from tandem.core.clock import Clock
from tandem.core.config import ModelConfig

_BATCH_SCRIPT = Path(__file__).parents[1] / "peers" / "transformers_batch.py"
_MOST_WARM_UPS = 8
_STEADY = 1.15
"""A server is warm when each of its last two warm-ups took at most this many times as long as its fastest one."""


class Failure(Exception):
    """Raised when a system under test cannot run or its run failed."""


class SystemUnderTest(Protocol):
    """A system that a bench can run.

    `runs(workload)` returns whether it supports the workload; `run(workload)` runs it.
    """

    name: str

    def runs(self, workload: Workload) -> bool: ...

    async def run(self, workload: Workload) -> Run: ...


class ServedSystem:
    """System under test that is a server; it is paused except while its own run is being measured."""

    def __init__(self, server: SystemServer, clock: Clock) -> None:
        self.name = server.name
        self._server = server
        self._clock = clock
        self._num_warm_ups = 0

    def runs(self, workload: Workload) -> bool:
        return True

    async def run(self, workload: Workload) -> Run:
        if self._server.has_ended:
            raise Failure(f"{self.name} has ended")
        with self._server.turn() as endpoint:
            await self._warm(endpoint)
            began = self._clock.now()
            records = await run_workload(endpoint, workload, self._clock)
            return _run_of(self.name, workload, records, self._clock.now() - began)

    async def _warm(self, endpoint: Endpoint) -> None:
        """Repeat the warm-up until its duration is steady.

        The kernel may have reclaimed memory of a server that was paused for minutes; the server's first seconds are
        then several times slower.
        """
        times: list[float] = []
        while len(times) < _MOST_WARM_UPS and not is_steady(times):
            self._num_warm_ups += 1
            began = self._clock.now()
            await run_workload(endpoint, warm_up(self._num_warm_ups), self._clock)
            times.append(self._clock.now() - began)


def is_steady(times: Sequence[float]) -> bool:
    """Return whether the last two of `times`, seconds of equal tasks, are about as short as the shortest."""
    return len(times) > 1 and max(times[-2:]) <= _STEADY * min(times)


class BatchSystem:
    """System under test that is a program: it reads a workload from one file and writes its run to another.

    The program warms up by itself.
    """

    def __init__(self, name: str, command: Sequence[str], directory: Path, only: str = "") -> None:
        self.name = name
        self._command = command
        self._directory = directory
        self._only = only

    def runs(self, workload: Workload) -> bool:
        """Return whether the program supports the workload: static batches of Transformers need prompts of equal
        length."""
        return self._only == "" or workload.name in self._only.split(",")

    async def run(self, workload: Workload) -> Run:
        source, target = self._directory / f"{self.name}-in.json", self._directory / f"{self.name}-out.json"
        fields = msgspec.to_builtins(workload)
        fields["warm_up"] = msgspec.to_builtins(warm_up(1).requests[-1])
        source.write_bytes(encode(fields))
        target.unlink(missing_ok=True)
        command = [part.format(source=source, target=target) for part in self._command]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, errors = await process.communicate()
        if process.returncode or not target.exists():
            raise Failure(f"{self.name} ended with {process.returncode}:\n{errors.decode(errors='replace')[-2000:]}")
        return self._read(workload, target.read_bytes())

    def _read(self, workload: Workload, raw: bytes) -> Run:
        if self._only == "":
            return msgspec.structs.replace(decode_run(raw), system=self.name)
        output = msgspec.json.decode(raw, type=_BatchOutput)
        return _run_of(self.name, workload, output.records, output.wall_s)


class _BatchOutput(msgspec.Struct):
    records: tuple[Record, ...]
    wall_s: float


def _run_of(name: str, workload: Workload, records: tuple[Record, ...], wall_s: float) -> Run:
    return Run(
        system=name,
        workload=workload.name,
        seed=workload.seed,
        turn=workload.turn,
        records=records,
        wall_s=wall_s,
    )


class SystemFactory:
    """Start systems under test by name.

    `variants` maps the user's own names to flags of `tandem serve`.
    """

    def __init__(
        self,
        settings: Settings,
        variants: Mapping[str, Sequence[str]],
        clock: Clock,
        directory: Path,
        stack: AsyncExitStack,
    ) -> None:
        self._settings, self._variants, self._clock = settings, variants, clock
        self._directory, self._stack = directory, stack

    async def enter(self, name: str) -> SystemUnderTest:
        """Start the named system, or attach to it if it already runs, and return it. Raises Failure or NotStarted."""
        if "=" in name:
            return await self._serve(await attached(*name.split("=", 1)))
        if name in self._variants or name == "tandem":
            return await self._serve(self._tandem(name, self._variants.get(name, ())))
        if name == "tandem-offline":
            flags = [*self._shared_flags(), *self._variants.get("tandem", ())]
            program = (sys.executable, "-m", "loadtest", "offline")
            command = (*program, "--workload-file", "{source}", "--json", "{target}", "--quiet", "--flags", *flags)
            return BatchSystem(name, command, self._directory)
        if not is_installed(name.split("-")[0]):
            raise Failure(f"{name} is not installed: python -m loadtest peers install {name.split('-')[0]}")
        if name.startswith("transformers"):
            return self._transformers(name)
        return await self._serve(server_command(name, self._settings, free_port()))

    async def _serve(self, command: ServerCommand) -> SystemUnderTest:
        sys.stderr.write(f"starting {command.name} ...\n")
        return ServedSystem(
            await self._stack.enter_async_context(running_server(command, self._directory)), self._clock
        )

    def _tandem(self, name: str, flags: Sequence[str]) -> ServerCommand:
        port = free_port()
        program = (sys.executable, "-m", "loadtest.processes.tandem_server", "--port", str(port))
        return ServerCommand(
            name=name,
            endpoint=Endpoint(url=f"http://127.0.0.1:{port}", model=ModelConfig().id, extra=ANSWER_TOKENS),
            command=(*program, "--served-model-name", ModelConfig().id, *self._shared_flags(), *flags),
            can_pause=False,  # gateway, workers and Redis time each other out when one of them is paused
        )

    def _shared_flags(self) -> list[str]:
        settings = self._settings
        return ["--model", str(settings.model), "--max-num-batched-tokens", str(settings.chunk)]

    def _transformers(self, name: str) -> BatchSystem:
        command = [str(python_of("transformers")), str(_BATCH_SCRIPT), str(self._settings.floats)]
        command += ["{source}", "{target}", "--threads", str(self._settings.threads)]
        if name == "transformers-cb":
            return BatchSystem(name, [*command, "--continuous"], self._directory, only="throughput")
        only = "decode,prefill-128,prefill-512,prefill-2048,throughput,edit"
        return BatchSystem(name, command, self._directory, only=only)


async def attached(name: str, address: str) -> ServerCommand:
    """Describe a server that already runs, from its address `URL` or `URL@PROCESS_GROUP`.

    Its model is the first one that the server lists. Raises Failure.
    """
    url, _, group = address.partition("@")
    if group:
        os.killpg(int(group), signal.SIGCONT)
    url = base_url(url)
    try:
        model = await first_model(url)
    except NoEndpoint as error:
        raise Failure(str(error)) from error
    return ServerCommand(name=name, endpoint=Endpoint(url=url, model=model, extra=ANSWER_TOKENS), group=int(group or 0))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
