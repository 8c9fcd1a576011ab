"""The services of deploy/compose.yaml that make a cluster, without the monitoring stack."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.containers.engine import ContainerEngine, NoEngine
from tests.containers.images import ROOT

FILE = ROOT / "deploy/compose.yaml"
SERVICES = ("secret", "redis", "gateway", "prefill", "decode")
HTTP, GRPC = "http://127.0.0.1:8000", "127.0.0.1:8001"
MODEL = "smollm2-135m-instruct"
_HEALTHY_S = 300


def compose_program() -> str:
    path = Path(sys.executable).parent / "docker-compose"
    if not path.exists():
        raise NoEngine("docker-compose is not installed: make setup")
    return str(path)


def until(is_so: Callable[[], bool], what: str, patience_s: float = _HEALTHY_S) -> None:
    end = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end, f"not within {patience_s:.0f} s: {what}"
        time.sleep(0.2)


class Stack:
    """A cluster in containers: one gateway, one prefill and one decode worker, Redis."""

    def __init__(self, engine: ContainerEngine) -> None:
        self.engine = engine

    @staticmethod
    def redis_image() -> str:
        return str(yaml.safe_load(FILE.read_text())["services"]["redis"]["image"])

    def compose(self, *words: str, timeout_s: float = 120.0) -> str:
        return self.engine.run(compose_program(), "--file", str(FILE), *words, timeout_s=timeout_s)

    def up(self) -> None:
        """Start all services and wait until those with a health check are healthy."""
        words = ("--no-build", "--pull=never", "--detach", "--wait", f"--wait-timeout={_HEALTHY_S}")
        # `up --wait` takes a service that has ended for a failure; the gateway and the workers wait for `secret`.
        self.compose("up", *words, *SERVICES[1:], timeout_s=_HEALTHY_S + 60.0)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "5")

    def container(self, service: str) -> dict[str, Any]:
        """Return what the engine says of a service's container."""
        name = self.compose("ps", "--all", "--quiet", service).strip()
        (found,) = json.loads(self.engine.docker("inspect", name))
        return dict(found)

    def within(self, service: str, *command: str) -> str:
        """Run a command in a service's container."""
        return self.compose("exec", "--no-TTY", service, *command)

    def kill(self, service: str) -> None:
        """Kill a service's program at once, as a crash would: its container ends, and the engine restarts it."""
        self.within(service, "sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)")

    def num_restarts(self, service: str) -> int:
        return int(self.container(service)["RestartCount"])

    def wait_until_healthy(self, service: str) -> None:
        until(lambda: self.container(service)["State"]["Health"]["Status"] == "healthy", f"{service} is healthy")

    def num_running(self, service: str) -> int:
        """Return the sequences that a worker's engine runs."""
        script = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:9100/metrics').read().decode())"
        lines = self.within(service, "python", "-c", script).splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running")))

    def chat(self, text: str, num_tokens: int = 0) -> httpx.Response:
        """Ask for an answer, of exactly `num_tokens` tokens unless that is 0."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0}
        if num_tokens:
            body |= {"max_tokens": num_tokens, "ignore_eos": True}
        return httpx.post(f"{HTTP}/v1/chat/completions", json=body, timeout=120.0, trust_env=False)
