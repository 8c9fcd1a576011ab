"""Start and query a Prometheus server over deploy/prometheus with changed addresses and intervals."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.files import PROMETHEUS, read_yaml
from tests.deploy.programs import program
from tests.e2e.cluster import PATIENCE_S, spawn
from tests.e2e.gateway.processes import until
from tests.ports import free_port

INTERVAL_S = 1


class Prometheus:
    """Own a running server, queried over its HTTP API."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False)

    def is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, what: str, **parameters: str) -> Any:
        """Return the `data` of an API call, which must not fail."""
        answer = self._http.get(f"/api/v1/{what}", params=parameters).json()
        assert answer["status"] == "success", (answer["errorType"], answer["error"], parameters)
        return answer["data"]

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the labels, in their order, and the current value of each series; a scalar has no labels."""
        data = self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return {(): float(data["result"][1])}
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in data["result"]}

    def value(self, expression: str) -> float:
        """Return the value of the only series; 0 while there is none."""
        values = self.query(expression).values()
        assert len(values) <= 1, expression
        return next(iter(values), 0.0)

    def has_data(self, expression: str, since: float) -> bool:
        """Return whether a range query, as dashboards send it, has a number at some moment."""
        now = str(self.value("time()"))
        found = self.get("query_range", query=expression, start=str(since), end=now, step=f"{INTERVAL_S}s")["result"]
        return any(math.isfinite(float(value)) for series in found for _, value in series["values"])

    def close(self) -> None:
        self._http.close()


def configuration(gateway: str, planner: str) -> str:
    """Return deploy/prometheus/prometheus.yml with short intervals, for the metrics of a gateway and of a planner at
    host:port."""
    text = (PROMETHEUS / "prometheus.yml").read_text()
    text, places = re.subn(r"\bgateway:9100\b", gateway, text)
    text, intervals = re.subn(r"(\w+_interval): \w+", rf"\1: {INTERVAL_S}s", text)
    assert (places, intervals) == (2, 3)
    configured = yaml.safe_load(text)
    configured["scrape_configs"].append({"job_name": "tandem-planner", "static_configs": [{"targets": [planner]}]})
    return yaml.safe_dump(configured)


@contextmanager
def prometheus(directory: Path, gateway: str, planner: str) -> Iterator[Prometheus]:
    """Run a server that scrapes a cluster, with its rules and its exemplars. `gateway`, `planner`: host:port of their
    metrics."""
    file = directory / "prometheus.yml"
    file.write_text(configuration(gateway, planner))
    for rules in read_yaml(file)["rule_files"]:
        shutil.copy(PROMETHEUS / rules, directory)
    address = f"127.0.0.1:{free_port()}"
    options = {
        "config.file": file,
        "storage.tsdb.path": directory / "data",
        "web.listen-address": address,
        "enable-feature": "exemplar-storage",
        "log.level": "warn",
    }
    log = directory / "prometheus.log"
    with log.open("wb") as stream:
        flags = [f"--{name}={value}" for name, value in options.items()]
        process = spawn(program("prometheus"), *flags, stdout=stream, stderr=subprocess.STDOUT)
    server = Prometheus(f"http://{address}")
    try:
        until(server.is_ready, "a Prometheus that is ready")
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(PATIENCE_S)
    assert "level=error" not in log.read_text()


def filled_in(expression: str, values: Mapping[str, str]) -> str:
    """Replace Grafana's variables in an expression; all of them must be known."""
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)
