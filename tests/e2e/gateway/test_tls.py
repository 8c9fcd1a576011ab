"""Test gateway processes with TLS at their listeners: requests in both protocols, files that change under an open
stream, client certificates, and the commands and scripts that check such a gateway.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from tandem.core.config import GatewayConfig
from tandem.wire.channels import CHANNEL_OPTIONS
from tandem.wire.gen import inference_pb2 as pb
from tandem.wire.gen.inference_pb2_grpc import InferenceStub
from tests.certificates import Authority
from tests.e2e.cluster import PATIENCE_S
from tests.e2e.gateway.http import LONG_ANSWER, Post, completion, send
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import Gateway, cluster, until

SCRIPTS = Path(__file__).resolve().parents[3] / "helm" / "tandem" / "files" / "tests"
UNUSABLE = "the TLS files are unusable"


def flags(files: GatewayConfig) -> list[str]:
    found = ["--ssl-certfile", files.tls_cert_file, "--ssl-keyfile", files.tls_key_file]
    return [*found, "--ssl-ca-certs", files.tls_client_ca_file] if files.tls_client_ca_file else found


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.ca)


def status(gateway: Gateway, authority: Authority) -> int:
    """The status of a completion over a connection of its own."""
    return send(gateway.url, completion(40, 1, 8), context=trusting(authority)).status


def stream_chat(gateway: Gateway, authority: Authority) -> list[pb.ChatReply]:
    """Return the messages of a streamed answer; tokens that are there at once share one."""
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    with grpc.secure_channel(gateway.grpc_target, credentials, options=CHANNEL_OPTIONS) as channel:
        stub = InferenceStub(channel)
        request = pb.ChatRequest(model="tiny", messages=[pb.ChatMessage(role="user", content="Hello")])
        request.max_completion_tokens = 8
        replies = list(stub.StreamChat(request, timeout=PATIENCE_S))  # type: ignore[arg-type]
        assert replies[-1].choices[0].finish_reason
        return replies


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def install(fresh: GatewayConfig, files: GatewayConfig) -> None:
    shutil.copyfile(fresh.tls_cert_file, files.tls_cert_file)
    shutil.copyfile(fresh.tls_key_file, files.tls_key_file)


@pytest.mark.timeout(300)
def test_gateways_with_tls(tmp_path: Path, redis_url: str, model: Path) -> None:
    ours, next_one = Authority(tmp_path / "ours"), Authority(tmp_path / "next")
    files, strict = ours.issue_for_gateway("gateway"), ours.issue_for_gateway("mutual", requires_client=True)
    fresh = next_one.issue_for_gateway("fresh")
    with cluster(tmp_path, redis_url, model, *SETTINGS, "--namespace", "listener-tls") as running:
        worker = running.worker("w", "mixed")
        gateway, mutual = running.gateway("gateway", *flags(files)), running.gateway("mutual", *flags(strict))
        for program in (worker, gateway, mutual):
            program.wait_ready()
        for program in (gateway, mutual):
            program.context = trusting(ours)
            program.wait_serving()
        assert gateway.url.startswith("https://")
        assert status(gateway, ours) == 200 and stream_chat(gateway, ours)
        _check_with_commands(gateway, mutual, ours)

        with Post(gateway.url, completion(40, 2, LONG_ANSWER, stream=True), context=trusting(ours)) as post:
            post.wait_events(2)
            install(fresh, files)
            with pytest.raises(ssl.SSLCertVerificationError):
                status(gateway, ours)
            assert status(gateway, next_one) == 200 and stream_chat(gateway, next_one)
            post.wait_events(40)
        shutil.copyfile(strict.tls_key_file, files.tls_key_file)
        assert [status(gateway, next_one) for _ in range(3)] == [200] * 3
        until(lambda: UNUSABLE in gateway.log, "a line about the files")
        ready = httpx.get(f"{gateway.url}/ready", verify=trusting(next_one), trust_env=False).json()
        assert UNUSABLE in ready["warning"] and "KEY_VALUES_MISMATCH" in ready["warning"]

        assert [program.stop() for program in (gateway, mutual)] == [0, 0]
        (line,) = gateway.complaints()
        assert UNUSABLE in line and mutual.complaints() == []


def _check_with_commands(gateway: Gateway, mutual: Gateway, authority: Authority) -> None:
    """Run the doctor and the scripts of `helm test`, which have no certificate, against both gateways."""
    for one, mode in ((gateway, "server"), (mutual, "mutual")):
        ca = str(authority.ca)
        doctor = run("-m", "tandem.cli", "doctor", "--only", "gateway", "--url", one.url, "--ca-file", ca)
        assert doctor.returncode == 0, doctor.stdout + doctor.stderr
        for script in ("ask_http.py", "ask_grpc.py"):
            source = (SCRIPTS / script).read_text()
            done = run("-c", source, HTTP=one.url, GRPC=one.grpc_target, TLS=mode, CA_FILE=ca)
            assert done.returncode == 0, done.stdout + done.stderr
            assert ("refused, as whoever lacks" in done.stdout) is (mode == "mutual"), done.stdout
