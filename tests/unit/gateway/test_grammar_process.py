"""Test the real process that compiles grammars: its bounds, its restarts, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.output.grammar_compiler import PROCESS_NAME
from tandem.gateway.serving import grammar_process as module
from tandem.gateway.serving.grammar_process import GrammarProcess, Verdict
from tests.pids import is_running

pytestmark = pytest.mark.slow

GOOD = Verdict(True)
SLOW = json.dumps({"type": "object", "patternProperties": {f"^x{i}[a-z]+$": {} for i in range(400)}})
DEEP = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(20_000)) + '\nr20000: "b"'


@pytest.fixture
async def process() -> AsyncIterator[GrammarProcess]:
    process = GrammarProcess()
    yield process
    await process.stop()


def fact(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


async def started(process: GrammarProcess) -> int:
    """Start the process with its first grammar, and return its id."""
    await process.compile("regex", "a")
    assert process.pid is not None
    return process.pid


async def gone(pid: int) -> None:
    while is_running(pid):
        await asyncio.sleep(0.01)


async def test_grammars_of_every_notation(process: GrammarProcess) -> None:
    assert process.pid is None, "it starts with the first grammar"
    assert await process.compile("regex", "[0-9]+") == GOOD
    pid = process.pid
    assert pid is not None and fact(pid, "comm").strip() == PROCESS_NAME
    assert await process.compile("json_schema", '{"type": "string", "pattern": "ü+"}') == GOOD
    assert await process.compile("lark", 'start: "' + "a" * 100_000 + '"') == GOOD
    lark = await process.compile("gbnf", 'root ::= "a"')
    assert lark.is_good and await process.compile("lark", lark.text) == GOOD
    for notation, source in (("regex", "("), ("json_schema", "{"), ("lark", "start: x"), ("gbnf", "root ::= (")):
        verdict = await process.compile(notation, source)
        assert not verdict.is_good and verdict.text
    assert process.pid == pid
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)


async def test_it_runs_with_little_memory_and_without_secrets(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_REDIS__URL", "redis://SECRET")
    pid = await started(process)
    lines = fact(pid, "status").splitlines()
    assert next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) < 64 << 10, "in KiB"
    assert "SECRET" not in fact(pid, "environ")


@pytest.mark.parametrize(
    ("notation", "source", "reason"),
    [("json_schema", SLOW, "more than 1 s of processor time"), ("lark", DEEP, "nested too deeply")],
    ids=["slow", "deep"],
)
async def test_a_grammar_that_takes_too_much_is_refused_and_the_process_replaced(
    process: GrammarProcess, notation: str, source: str, reason: str
) -> None:
    pid = await started(process)
    verdict = await process.compile(notation, source)
    assert not verdict.is_good and reason in verdict.text
    assert not is_running(pid)
    assert await process.compile("regex", "a") == GOOD and process.pid != pid


async def test_a_killed_process_is_started_again_for_the_same_grammar(process: GrammarProcess) -> None:
    pid = await started(process)
    os.kill(pid, signal.SIGKILL)
    await gone(pid)
    assert await process.compile("regex", "b") == GOOD and process.pid not in (None, pid)


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (module, "_MODULE", "tandem.there_is_no_such_module", "has ended 2 times"),
        (sys, "executable", "/there/is/none", "cannot be started"),
    ],
    ids=["no such module", "no such program"],
)
async def test_a_process_that_cannot_run_is_no_fault_of_the_grammar(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch, owner: ModuleType, name: str, value: str, reason: str
) -> None:
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(TandemError, match=reason) as caught:
        await process.compile("regex", "a")
    assert (caught.value.kind, caught.value.reason) == (ErrorKind.OVERLOADED, "grammars")
    assert process.pid is None


async def test_a_process_that_does_not_answer_is_killed(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = await started(process)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitpid, pid, os.WUNTRACED)  # until each of its threads has stopped
    monkeypatch.setattr(module, "MAX_SILENCE_S", 0.1)
    with pytest.raises(TandemError, match="has not answered"):
        await process.compile("regex", "b")
    assert not is_running(pid)


async def test_an_interrupt_from_the_terminal_does_not_reach_it(process: GrammarProcess) -> None:
    pid = await started(process)
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGINT)
    assert await process.compile("regex", "b") == GOOD and process.pid == pid


async def test_a_stop_leaves_no_process() -> None:
    process = GrammarProcess()
    pid = await started(process)
    assert await process.stop() == -signal.SIGKILL
    assert not is_running(pid) and process.pid is None
    assert await process.stop() == 0


async def test_it_ends_with_its_gateway() -> None:
    program = """
        import asyncio, os, signal
        from tandem.gateway.serving.grammar_process import GrammarProcess

        async def main():
            process = GrammarProcess()
            await process.compile("regex", "a")
            print(process.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = await asyncio.to_thread(
        subprocess.run, (sys.executable, "-c", textwrap.dedent(program)), stdout=subprocess.PIPE, env=environment
    )
    assert done.returncode == -signal.SIGKILL
    await gone(int(done.stdout))
