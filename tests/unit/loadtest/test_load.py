"""The command against a server in this process: what it prints, writes and ends with."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from aiohttp import web

from loadtest.__main__ import main
from loadtest.client.records import Record
from loadtest.load.report_file import read_report
from tests.unit.loadtest.made import STEPS, written
from tests.unit.loadtest.served import Respond, chunk, serving, stream

MIX = """
rate: 400
groups:
  short: {share: 0.8, prompt: [5, 9], output: [2, 4], tenant: acme}
  long: {share: 0.2, prompt: 30, output: 3, tenant: globex, turns: 2, think_s: 0.001}
"""


async def answer_as_requested(request: web.Request) -> web.StreamResponse:
    num_requested = (await request.json())["max_tokens"]
    return await stream(request, *(chunk(text="a", token_ids=[5]) for _ in range(num_requested)), b"[DONE]")


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    path = tmp_path / "mix.yaml"
    path.write_text(MIX)
    return path


async def loaded(respond: Respond, mix: Path, *flags: str) -> int:
    async with serving(respond) as endpoint, asyncio.timeout(60):
        return await asyncio.to_thread(main, ["load", f"{endpoint.url}/v1", "--workload", str(mix), *flags])


async def test_a_load_test_reports_and_writes(mix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, lines = (tmp_path / name for name in ("a.json", "a.jsonl"))
    flags = ["--count", "40", "--slo-ttft-ms", "60000", "--json", str(report)]
    flags += ["--record", str(lines), "--steps", str(written(tmp_path, *STEPS)), "--name", "here"]
    assert await loaded(answer_as_requested, mix, *flags) == 0
    out = capsys.readouterr().out
    assert out.startswith("## Load: here\n") and "model m, workload mix.yaml, seed 0, count 40" in out
    assert "| w1 | mixed | 0 |" in out  # its steps are of another time
    saved = read_report(report)
    whole, long, short, acme, globex = saved.scopes
    assert (whole.num_requests, long.num_requests, short.num_requests) == (48, 16, 32)  # two turns of each long one
    assert (acme.num_requests, globex.num_requests) == (32, 16)
    assert whole.num_good == whole.num_whole == 48
    records = [msgspec.json.decode(line, type=Record) for line in lines.read_bytes().splitlines()]
    assert len(records) == len({record.name for record in records}) == 48
    assert sum(record.num_output_tokens for record in records) == pytest.approx(whole.output_rate * saved.wall_s)


@pytest.mark.nightly
async def test_a_load_test_plots_its_times_and_its_steps(mix: Path, tmp_path: Path) -> None:
    chart, steps = tmp_path / "a.svg", written(tmp_path, *STEPS)
    assert await loaded(answer_as_requested, mix, "--count", "40", "--chart", str(chart), "--steps", str(steps)) == 0
    texts = {"".join(element.itertext()).strip() for element in ElementTree.parse(chart).iter()}
    assert {"Time to first token, from when it was due", "Tokens of an iteration: mixed worker w1"} <= texts


async def test_failures_are_counted_by_kind_and_end_with_1(mix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_seen = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal num_seen
        num_seen += 1
        return web.Response(status=429, text="slow down") if num_seen == 3 else await answer_as_requested(request)

    assert await loaded(respond, mix, "--count", "10") == 1
    assert "| http 429 | 1 |" in capsys.readouterr().out


async def refuse(_: web.Request) -> web.StreamResponse:
    return web.Response(status=503)


async def test_when_nothing_was_answered_there_is_a_report_without_latencies(
    mix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await loaded(refuse, mix, "--count", "4") == 1
    assert "| http 503 | 4 |" in capsys.readouterr().out


@pytest.mark.nightly
async def test_when_nothing_was_answered_there_is_a_chart_without_latencies(mix: Path, tmp_path: Path) -> None:
    assert await loaded(refuse, mix, "--count", "4", "--chart", str(tmp_path / "a.png")) == 1
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workload", "nothing"], "nothing"),
        (["--count", "0"], "count"),
        (["--rate", "-1"], "rate"),
        (["--record", "/nowhere/a.jsonl"], "/nowhere/a.jsonl"),
        (["--count", "1"], "/v1/models"),
    ],
)
def test_impossible_flags_are_refused_with_a_reason(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", "http://127.0.0.1:9", *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--key", "nokey"], ["--chart", "a.pdf"], ["--max-open", "0"]])
def test_flags_that_make_no_sense_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["load", "http://127.0.0.1:9", *flags])


# A shell's background jobs are started with the signal ignored.
INTERRUPTIBLE = """
import signal, sys
from loadtest.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
async def test_ctrl_c_prints_what_was_measured_until_then(mix: Path) -> None:
    enough, over, num_seen = asyncio.Event(), asyncio.Event(), 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal num_seen
        num_seen += 1
        if num_seen > 20:  # with one open at a time, 20 have ended
            enough.set()
            await over.wait()
        return await answer_as_requested(request)

    async with serving(respond) as endpoint, asyncio.timeout(60):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", INTERRUPTIBLE, "load", endpoint.url, "--workload", str(mix), "--max-open", "1"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        await enough.wait()
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        over.set()
    assert process.returncode == 130
    assert "**Stopped before its end.**" in out.decode()
    assert "\n20 requests in" in out.decode()
