"""What a bench compares: servers asked over HTTP and programs that run a batch of requests; ranks none of them."""

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
from loadtest.client.open_loop import ask_endpoint
from loadtest.client.records import Record, Run, decode_run, encode
from loadtest.client.workloads import Workload, warm_up
from loadtest.peers.catalog import Settings, is_installed, python_of, server_command
from loadtest.processes.systems import ServerCommand, SystemServer, running_server
from tandem.core.clock import Clock
from tandem.core.config import ModelConfig

_BATCH_SCRIPT = Path(__file__).parent / "peers" / "transformers_batch.py"
_MOST_WARM_UPS = 8
_STEADY = 1.15
"""The last two warm-ups took at most so many times the best one."""


class Failure(Exception):
    """A contender cannot run, or did not."""


class SystemUnderTest(Protocol):
    """`runs(workload)`: whether it can at all."""

    name: str

    def runs(self, workload: Workload) -> bool: ...

    async def run(self, workload: Workload) -> Run: ...


class ServedContender:
    """A server, which runs only while it is its turn."""

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
            records = await ask_endpoint(endpoint, workload, self._clock)
            return _run_of(self.name, workload, records, self._clock.now() - began)

    async def _warm(self, endpoint: Endpoint) -> None:
        """Until it is steady: the kernel may have taken memory from a server that was paused for minutes, and then its
        first seconds are several times slower."""
        times: list[float] = []
        while len(times) < _MOST_WARM_UPS and not is_steady(times):
            self._num_warm_ups += 1
            began = self._clock.now()
            await ask_endpoint(endpoint, warm_up(self._num_warm_ups), self._clock)
            times.append(self._clock.now() - began)


def is_steady(times: Sequence[float]) -> bool:
    """Whether the last two of equal tasks took about as long as the best one did."""
    return len(times) > 1 and max(times[-2:]) <= _STEADY * min(times)


class BatchContender:
    """A program that takes a workload as a file and leaves the run as another. It warms up by itself."""

    def __init__(self, name: str, command: Sequence[str], directory: Path, only: str = "") -> None:
        self.name = name
        self._command = command
        self._directory = directory
        self._only = only

    def runs(self, workload: Workload) -> bool:
        """Transformers' static batches are of equal lengths."""
        return self._only == "" or workload.name in self._only.split(",")

    async def run(self, workload: Workload) -> Run:
        source, target = self._directory / f"{self.name}-in.json", self._directory / f"{self.name}-out.json"
        fields = msgspec.to_builtins(workload)
        fields["warm_up"] = msgspec.to_builtins(warm_up(1).asks[-1])
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
        told = msgspec.json.decode(raw, type=_Told)
        return _run_of(self.name, workload, told.records, told.wall_s)


class _Told(msgspec.Struct):
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
    """Makes contenders by name. `variants`: names of the user's own, with flags of `tandem serve`."""

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
        """Raises Failure or NotStarted."""
        if "=" in name:
            return await self._serve(await attached(*name.split("=", 1)))
        if name in self._variants or name == "tandem":
            return await self._serve(self._tandem(name, self._variants.get(name, ())))
        if name == "tandem-offline":
            flags = [*self._shared_flags(), *self._variants.get("tandem", ())]
            program = (sys.executable, "-m", "loadtest", "offline")
            command = (*program, "--workload-file", "{source}", "--json", "{target}", "--quiet", "--flags", *flags)
            return BatchContender(name, command, self._directory)
        if not is_installed(name.split("-")[0]):
            raise Failure(f"{name} is not installed: python -m loadtest peers install {name.split('-')[0]}")
        if name.startswith("transformers"):
            return self._transformers(name)
        return await self._serve(server_command(name, self._settings, free_port()))

    async def _serve(self, command: ServerCommand) -> SystemUnderTest:
        sys.stderr.write(f"starting {command.name} ...\n")
        return ServedContender(
            await self._stack.enter_async_context(running_server(command, self._directory)), self._clock
        )

    def _tandem(self, name: str, flags: Sequence[str]) -> ServerCommand:
        port = free_port()
        program = (sys.executable, "-m", "loadtest.processes.tandem_server", "--port", str(port))
        return ServerCommand(
            name=name,
            endpoint=Endpoint(url=f"http://127.0.0.1:{port}", model=ModelConfig().id, extra=ANSWER_TOKENS),
            command=(*program, "--served-model-name", ModelConfig().id, *self._shared_flags(), *flags),
            can_pause=False,  # gateway, workers and Redis watch each other's silence
        )

    def _shared_flags(self) -> list[str]:
        settings = self._settings
        return ["--model", str(settings.model), "--max-num-batched-tokens", str(settings.chunk)]

    def _transformers(self, name: str) -> BatchContender:
        command = [str(python_of("transformers")), str(_BATCH_SCRIPT), str(self._settings.model)]
        command += ["{source}", "{target}", "--threads", str(self._settings.threads)]
        if name == "transformers-cb":
            return BatchContender(name, [*command, "--continuous"], self._directory, only="throughput")
        only = "decode,prefill-128,prefill-512,prefill-2048,throughput,edit"
        return BatchContender(name, command, self._directory, only=only)


async def attached(name: str, place: str) -> ServerCommand:
    """A server that somebody else started, `URL` or `URL@PROCESS_GROUP`; its model is the first that it lists. Raises
    Failure."""
    url, _, group = place.partition("@")
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
