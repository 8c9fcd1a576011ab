"""Run Ray as KubeRay starts it in a pod, with its environment, and deploy through Serve's REST API as KubeRay does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.e2e.cluster import spawn
from tests.e2e.serve.served import END_S, START_S, kill_tree, until
from tests.ports import free_port

HOST = "127.0.0.1"


class Head:
    """Own a Ray cluster whose one node has `resources`. `proxy` is the address of Serve's proxy after a deployment."""

    def __init__(self, directory: Path, resources: str, environment: dict[str, str]) -> None:
        # Ray's sockets have long names under this one, and 107 bytes are all that they may have.
        self._sessions = tempfile.TemporaryDirectory(prefix="ray-")
        dashboard, self._proxy_port = free_port(), free_port()
        self._api = f"http://{HOST}:{dashboard}/api/serve/applications/"
        self.proxy = f"http://{HOST}:{self._proxy_port}"
        self._log = directory / "head.log"
        ports = {"--port": free_port(), "--dashboard-port": dashboard, "--dashboard-agent-listen-port": free_port()}
        words = [word for name, port in ports.items() for word in (name, str(port))]
        start = ("start", "--head", "--block", "--node-ip-address", HOST, "--num-cpus", "4", "--num-gpus", "0")
        room = ("--object-store-memory", str(100 << 20), "--resources", resources)
        own = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "RAY_"))}
        ray = (sys.executable, "-m", "ray.scripts.scripts")
        with self._log.open("wb") as log:
            self._process = spawn(
                *(*ray, *start, *room, "--temp-dir", self._sessions.name, *words),
                env=own | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"} | environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Head:
        until(self._answers, START_S, lambda: self._log.read_text(errors="replace"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill everything at once, workers included."""
        kill_tree(self._process)
        self._sessions.cleanup()

    def deploy(self, document: dict[str, Any]) -> None:
        """Deploy a whole `serveConfigV2`, which replaces the previous one, with a port of this node; do not wait."""
        body = document | {"http_options": {"host": HOST, "port": self._proxy_port}}
        answer = httpx.put(self._api, json=body, timeout=END_S, trust_env=False)
        assert answer.status_code == 200, answer.text

    def applications(self) -> dict[str, Any]:
        """Return the state of each application as Serve reports it."""
        response = httpx.get(self._api, timeout=END_S, trust_env=False)
        assert response.status_code == 200, response.text
        applications: dict[str, Any] = response.json()["applications"]
        return applications

    def wait_running(self, *names: str) -> None:
        """Wait until these applications run as deployed. A failed one fails the test."""

        def all_run() -> bool:
            found = self.applications()
            states = {name: found.get(name, {}).get("status") for name in names}
            assert "DEPLOY_FAILED" not in states.values(), found
            return set(states.values()) == {"RUNNING"}

        until(all_run, START_S, lambda: str(self.applications()))

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        return answers(self._api)


def answers(api: str) -> bool:
    try:
        return httpx.get(api, timeout=END_S, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
