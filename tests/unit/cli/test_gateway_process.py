"""Test how `tandem serve` runs its gateway process, with a scripted program in place of the gateway."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.cli import gateway_process
from tandem.cli.gateway_process import GatewayProcess
from tandem.core.config import Config, GatewayConfig
from tandem.core.settings import build, from_environment
from tests.certificates import Authority
from tests.pids import is_running

PATIENCE_S = 30.0

SERVER = """
import http.server, json, sys
answers = json.loads(sys.argv[1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/ready":
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            if status == 0:
                import os; os._exit(3)
        else:
            status, body = 200, '{"data": [{"id": "small"}]}'
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())
    def log_message(self, *args):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
scheme = "http"
if len(sys.argv) > 2:
    import ssl
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*sys.argv[2:])
    server.socket, scheme = context.wrap_socket(server.socket, server_side=True), "https"
print(json.dumps({"url": f"{scheme}://127.0.0.1:{server.server_port}", "grpc": "127.0.0.1:2"}), flush=True)
server.serve_forever()
"""


def scripted(answers: str, *certificate_and_key: str) -> list[str]:
    return [sys.executable, "-S", "-c", SERVER, answers, *certificate_and_key]


def test_the_gateway_becomes_ready_and_ends_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # must not be used for our own gateway
    with GatewayProcess(Config(), scripted('[[503, "not yet"], [503, "not yet"], [200, ""]]')) as child:
        assert child.wait_until_listening()
        assert child.wait_until_ready(PATIENCE_S) is None
        assert child.exit_code() is None
        assert child.grpc_target == "127.0.0.1:2"
    assert child.exit_code() == -signal.SIGTERM


def test_the_certificate_need_not_be_valid_for_the_address(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("elsewhere", dns="llm.example.org")
    with GatewayProcess(Config(), scripted('[[200, ""]]', files.tls_cert_file, files.tls_key_file)) as child:
        assert child.wait_until_listening()
        assert child.wait_until_ready(PATIENCE_S) is None


def test_the_gateway_may_be_stopped_before_its_context_ends() -> None:
    with GatewayProcess(Config(), scripted('[[200, ""]]')) as child:
        assert child.wait_until_listening()
        child.stop()
        assert child.exit_code() == -signal.SIGTERM


def test_the_reason_for_not_being_ready_is_returned() -> None:
    with GatewayProcess(Config(), scripted('[[503, "no live prefill worker"]]')) as child:
        assert child.wait_until_listening()
        assert child.wait_until_ready(0.5) == "after 0.5 s no live prefill worker"


def test_the_end_of_the_gateway_is_reported_at_once() -> None:
    with GatewayProcess(Config(), scripted('[[503, "not yet"], [0, ""]]')) as child:
        assert child.wait_until_listening()
        assert child.wait_until_ready(PATIENCE_S) == "it ended with code 3"
    with GatewayProcess(Config(), [sys.executable, "-S", "-c", ""]) as child:
        assert not child.wait_until_listening()


def test_the_gateway_gets_every_setting_by_environment(tmp_path: Path) -> None:
    config = Config(gateway=GatewayConfig(port=0, disaggregation="off"))
    config = replace(config, engine=replace(config.engine, enable_prefix_caching=False))
    environ_file = tmp_path / "environ"
    code = f"import json, os; json.dump(dict(os.environ), open({str(environ_file)!r}, 'w'))"
    with GatewayProcess(config, [sys.executable, "-S", "-c", code]) as child:
        assert not child.wait_until_listening()
    environment = dict(
        line.split(": ", 1) for line in environ_file.read_text().strip("{}").replace('"', "").split(", ")
    )
    assert build([("environment", from_environment(environment))]) == config


def test_a_gateway_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_process, "STOP_MARGIN_S", 0.2)
    code = (
        'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(\'{"url": "", "grpc": ""}\', flush=True)\n'
    )
    config = Config(gateway=GatewayConfig(drain_s=0))
    with GatewayProcess(config, [sys.executable, "-S", "-c", code + "while True: signal.pause()"]) as child:
        assert child.wait_until_listening()
    assert child.exit_code() == -signal.SIGKILL


def test_the_gateway_dies_with_a_killed_parent() -> None:
    child_code = 'import os, signal; print(\'{"url": "%d", "grpc": ""}\' % os.getpid(), flush=True); signal.pause()'
    code = (
        "import signal, sys\n"
        "from tandem.cli.gateway_process import GatewayProcess\n"
        "from tandem.core.config import Config\n"
        f"child = GatewayProcess(Config(), [sys.executable, '-S', '-c', {child_code!r}])\n"
        "child.wait_until_listening(); print(child.url, flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
        parent.wait()
    wait_for(lambda: not is_running(pid))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
