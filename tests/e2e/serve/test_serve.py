"""Test `tandem serve` from start to end: it answers, recovers from killed workers, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.serve.served import Served, cpu_ticks, until

pytestmark = pytest.mark.timeout(400)

FRANCE = "What is the capital of France?"
PATIENCE_S = 120.0
STOP_S = 45.0
"""Longer than a stop takes, and shorter than Ray's client waits for a control service that has ended."""


class Stream:
    """Read a long streamed answer in a separate thread."""

    def __init__(self, served: Served, max_tokens: int) -> None:
        self.events: list[dict[str, object]] = []
        self.is_done = False
        self._thread = threading.Thread(target=self._read, args=(served, max_tokens), daemon=True)
        self._thread.start()

    def _read(self, served: Served, max_tokens: int) -> None:
        content = "Write a very long story about a ship, a storm and an island."
        body = {"model": "smollm2-135m-instruct", "temperature": 0, "max_tokens": max_tokens, "stream": True}
        body["messages"] = [{"role": "user", "content": content}]
        url = f"{served.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.is_done = True
                elif line:
                    self.events.append(json.loads(line.removeprefix("data: ")))

    def wait_events(self, count: int) -> None:
        until(lambda: len(self.events) >= count, PATIENCE_S)

    def wait_end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    @property
    def finish_reasons(self) -> list[str]:
        choices = [choice for event in self.events for choice in event.get("choices", [])]
        return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]


def wait_remote_answer(served: Served) -> None:
    """Wait until a request goes through both workers again."""

    def answered() -> bool:
        response = served.chat(FRANCE, max_tokens=4)
        return response.status_code == 200 and response.headers["x-tandem-path"] == "remote"

    until(answered, PATIENCE_S, lambda: served.output)


def test_serve_answers_from_two_workers(served: Served) -> None:
    response = served.chat(FRANCE)
    assert response.status_code == 200, response.text
    assert "Paris" in response.json()["choices"][0]["message"]["content"]
    assert response.headers["x-tandem-path"] == "remote"


def test_the_workers_accept_only_the_secret_of_their_serve(served: Served, tmp_path: Path) -> None:
    """The banner's last line lists the arguments. The secret is where no other user sees it."""
    served.wait_output(r"tandem role .*\n")
    arguments = re.findall(r"tandem (role .*)\n", served.output)[0].split()
    command = [sys.executable, "-m", "tandem.cli", *arguments]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    rows = [line.split() for line in listed.stdout.splitlines()[1:]]
    assert sorted((row[1], row[2], row[6]) for row in rows) == [
        ("decode", "decode", "live,"),
        ("prefill", "prefill", "live,"),
    ]
    secret = Path(arguments[-1])
    assert secret.stat().st_mode & 0o777 == 0o600 and secret.parent.stat().st_mode & 0o777 == 0o700
    for pid, _ in served.look():
        for place in ("environ", "cmdline"):
            assert secret.read_bytes().strip() not in (Path("/proc") / str(pid) / place).read_bytes()
    other = tmp_path / "secret"
    other.write_text("x" * 64)
    strange = subprocess.run(
        [*command[:-1], str(other)], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert strange.stdout.count("unreachable: unauthenticated") == 2


def test_serve_streams_to_the_openai_client(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        chunks = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": FRANCE}],
            temperature=0,
            stream=True,
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "Paris" in "".join(parts)
    assert len([part for part in parts if part]) > 1


def test_the_output_has_no_warnings(served: Served) -> None:
    ready = served.output.partition("Tandem serves")[0]
    assert re.findall(r"WARN|ERROR|Traceback|raylet|namespace", ready) == []
    stages = [line.split()[2] for line in ready.splitlines() if re.match(r" +[\d.]+ s  ", line)]
    assert [stage for stage, _ in groupby(stages)] == ["redis", "model", "ray", "workers", "gateway", "ready"]
    logs = re.findall(r"logs of the workers: (\S+)", served.output)
    texts = {path.name: path.read_text() for path in Path(logs[0]).glob("replica_*.log")}
    for pool in ("prefill", "decode"):
        assert any(pool in name and "serves smollm2-135m-instruct" in text for name, text in texts.items()), texts


@pytest.mark.nightly
def test_a_taken_port_is_refused_before_anything_starts(served: Served) -> None:
    port = served.url.rpartition(":")[2]
    with Served("--port", port) as second:
        assert second.wait_end() == 2
        assert f"cannot listen on 127.0.0.1:{port}" in second.output and "--port" in second.output
        assert "Traceback" not in second.output and "redis" not in second.output
    assert served.chat(FRANCE, max_tokens=2).status_code == 200


@pytest.mark.nightly
def test_a_killed_prefill_worker_is_restarted(served: Served) -> None:
    victim = served.replica("prefill")
    assert victim is not None
    before = cpu_ticks(victim)
    with ThreadPoolExecutor(1) as pool:
        prompt = "storm and island, " * 700
        running: Future[httpx.Response] = pool.submit(served.chat, prompt, max_tokens=4)
        until(lambda: running.done() or cpu_ticks(victim) > before + 0.3 * os.sysconf("SC_CLK_TCK"), PATIENCE_S)
        os.kill(victim, signal.SIGKILL)
        response = running.result(PATIENCE_S)
    assert response.status_code == 200, response.text
    until(lambda: served.replica("prefill") not in (None, victim), PATIENCE_S, lambda: served.output)
    wait_remote_answer(served)


@pytest.mark.nightly
def test_a_decode_worker_killed_during_decode_is_restarted(served: Served) -> None:
    victim = served.replica("decode")
    assert victim is not None
    stream = Stream(served, max_tokens=400)
    stream.wait_events(5)
    os.kill(victim, signal.SIGKILL)
    stream.wait_end()
    assert stream.is_done and stream.finish_reasons, stream.events[-2:]
    until(lambda: served.replica("decode") not in (None, victim), PATIENCE_S, lambda: served.output)
    wait_remote_answer(served)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_signal_to_its_group_lets_a_stream_finish_and_leaves_nothing(served: Served, number: signal.Signals) -> None:
    """A terminal's Ctrl-C and a supervisor's SIGTERM go to the whole group."""
    redis = next(line for line in served.look().values() if "tandem-redis-" in line)
    run_dir = Path(re.findall(r"/\S*/tandem-redis-\w+", redis)[0])
    assert run_dir.is_dir()
    stream = Stream(served, max_tokens=40)
    stream.wait_events(3)
    served.look()
    num_chars_before = len(served.output)
    os.killpg(served.process.pid, number)
    stream.wait_end()
    assert stream.is_done and stream.finish_reasons in (["length"], ["stop"]), stream.events[-2:]
    assert served.wait_end() == 0, served.output
    assert re.findall(r"WARN|ERROR|Traceback|raylet|failed", served.output[num_chars_before:]) == []
    served.wait_nothing_left()
    assert not run_dir.exists()


@pytest.mark.nightly
@pytest.mark.parametrize(("stage", "number"), [("redis", signal.SIGINT), ("workers", signal.SIGTERM)])
def test_a_signal_during_the_start_ends_it(stage: str, number: signal.Signals) -> None:
    with Served("--port", "0") as starting:
        starting.wait_output(rf"  {stage} ")
        starting.look()
        os.kill(starting.process.pid, number)
        assert starting.wait_end() == 0, starting.output
        assert "stopped before it was ready" in starting.output and "Traceback" not in starting.output
        starting.wait_nothing_left()


@pytest.mark.nightly
def test_a_signal_to_each_process_ends_all(served: Served) -> None:
    """As systemd stops a service. Ray's own client would wait a minute for its control service."""
    own = served.process.pid
    for pid in [*(pid for pid, _ in served.look() if pid != own), own]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert served.process.wait(STOP_S) == 0, served.output
    assert "Traceback" not in served.output
    served.wait_nothing_left()


@pytest.mark.nightly
def test_a_killed_serve_takes_all_its_processes_with_it(served: Served) -> None:
    names = "\n".join(served.look().values())
    for part in ("tandem.cli gateway", "gcs_server", "raylet", "tandem-redis-", "tandem-prefill", "tandem-decode"):
        assert part in names, names
    served.process.kill()
    served.process.wait()
    # Ray's two agents first try for a minute to tell it to a server that is gone too.
    served.wait_nothing_left("ray::DashboardAgent", "ray::RuntimeEnvAgent")
