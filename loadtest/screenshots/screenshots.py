"""Write the pictures of the documents: the console and the overview board of a small cluster under load, and a
simulation's chart.

    python -m loadtest screenshots [--directory docs] [--duration-s 360]

Needs Chromium and Prometheus, which `.ci/system` installs. The console is Chromium's screenshot. The board is drawn,
without Grafana, from deploy/grafana/dashboards and from what a Prometheus with deploy/prometheus recorded of the run.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

from loadtest.bench.systems_under_test import free_port
from loadtest.common.plot import save
from loadtest.screenshots.board import query_range, render_board

_DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_START_S, _STOP_S = 600.0, 120.0
_CONSOLE, _BOARD, _CHART = "console.png", "grafana-overview.png", "simulate-chart.png"
_WIDTH, _HEIGHT = 1280, 1180
_TARGETS = ("--ttft-ms", "8000", "--itl-ms", "300", "--batch-ttft-ms", "20000", "--batch-itl-ms", "500")
_SERVE = ("serve", "--prefill", "1", "--decode", "2", *_TARGETS, "--early-rejection", "off")
_SIMULATE = (
    *("simulate", "--workload", "rag", "--rate", "8", "--count", "500"),
    *("--pools", "prefill=3,decode=1", "--slo", "ttft=2s,itl=40ms"),
)
_MIX = """
rate: 0.25
groups:
  chat: {share: 0.7, prefix: {tokens: 96}, prompt: [32, 120], output: [24, 48], lane: interactive}
  summary: {share: 0.3, prompt: [300, 600], output: [24, 48], lane: batch}
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest screenshots", description="Make the pictures of the documents.")
    parser.add_argument("--directory", type=Path, default=Path("docs"), help="default: %(default)s")
    parser.add_argument("--duration-s", type=float, default=360.0, help="of the load (default: %(default)s)")
    args = parser.parse_args(argv)
    url, prometheus_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-screenshots-")))
        serve, prometheus = (
            _tandem(*_SERVE, "--port", url.rpartition(":")[2]),
            _prometheus(directory, url, prometheus_url),
        )
        stack.enter_context(_running(serve, directory / "serve.log", f"{url}/ready"))
        stack.enter_context(_running(prometheus, directory / "prometheus.log", f"{prometheus_url}/-/ready"))
        (directory / "mix.yaml").write_text(_MIX)
        load = [sys.executable, "-m", "loadtest", "load", url, "--workload", str(directory / "mix.yaml")]
        began_s = time.time()
        client = subprocess.Popen([*load, "--send-priority", "--duration-s", f"{args.duration_s:g}"])
        stack.callback(client.kill)
        _photograph(url, args.directory / _CONSOLE, args.duration_s * 0.8)
        client.wait(args.duration_s + _START_S)
        board = json.loads((_DEPLOY / "grafana" / "dashboards" / "tandem-overview.json").read_text())
        window = began_s, began_s + args.duration_s
        query = functools.partial(query_range, prometheus_url, start_s=window[0], end_s=window[1])
        save(render_board(board, query, *window), args.directory / _BOARD)
    subprocess.run(_tandem(*_SIMULATE, "--chart", str(args.directory / _CHART)), check=True, stdout=subprocess.DEVNULL)
    for name in (_CONSOLE, _BOARD, _CHART):
        _shrink(args.directory / name)
    return 0


def _tandem(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tandem.cli", *arguments]


@contextmanager
def _running(command: Sequence[str], log: Path, ready_url: str) -> Iterator[None]:
    """Run a program; yields once `ready_url` answers 200. Raises RuntimeError, with the log's end, if it ends first."""
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(ready_url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_S)


def _answers(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False


def _prometheus(directory: Path, gateway_url: str, own_url: str) -> list[str]:
    """Return the command of a server with the rules of deploy/prometheus that scrapes one gateway and its workers."""
    shutil.copytree(_DEPLOY / "prometheus", directory, dirs_exist_ok=True)
    file = directory / "prometheus.yml"
    file.write_text(file.read_text().replace("gateway:9100", gateway_url.removeprefix("http://")))
    storage = f"--storage.tsdb.path={directory / 'data'}"
    return ["prometheus", f"--config.file={file}", storage, f"--web.listen-address={own_url.removeprefix('http://')}"]


def _photograph(url: str, path: Path, watch_s: float) -> None:
    """Write a screenshot of the console, whose charts show what arrived since the page was opened `watch_s` before."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        page.goto(f"{url}/console")
        page.wait_for_timeout(watch_s * 1e3)
        page.locator(".flow:not([data-idle])").first.wait_for(timeout=_START_S * 1e3)
        page.screenshot(path=path)
        browser.close()


def _shrink(path: Path) -> None:
    with Image.open(path) as image:
        image.convert("RGB").quantize(96).save(path, optimize=True)
