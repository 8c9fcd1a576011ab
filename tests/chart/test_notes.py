"""Test NOTES.txt: commands with the release's own names, and warnings about what is not ready for production."""

from __future__ import annotations

import yaml

from tandem.core.config import ModelConfig
from tests.chart.release import CI, NAMESPACE, ci, notes


def of(name: str) -> str:
    return notes(yaml.safe_load(CI[name].read_text()))


def test_notes_show_how_to_get_a_first_answer() -> None:
    text = of("cpu-trial")
    trial = ci("cpu-trial")
    service = trial.one("gateway-service")
    assert f"port-forward service/{service['metadata']['name']} 8000:80" in text
    assert "curl -i http://127.0.0.1:8000/v1/chat/completions" in text and '"model": "smollm2-135m-instruct"' in text
    assert 'authorization: Bearer $TANDEM_API_KEY"' in text
    secret = trial.one("tenants-secret")
    assert f"get secret {secret['metadata']['name']} -o jsonpath='{{.data.key}}'" in text
    assert "http://127.0.0.1:8000/console" in text and "gRPC is on port 8001" in text
    assert f"-n {NAMESPACE} exec deploy/{trial.one('gateway-deployment')['metadata']['name']} -- tandem doctor" in text
    assert "helm -n inference test rel" in text and "dashboards.enabled" in text


def test_notes_call_the_model_by_the_name_that_gateways_serve() -> None:
    for model in (
        {"id": "Qwen/Qwen3-8B"},
        {"id": "/cache/models/tiny.gguf"},
        {"id": "/cache/models/qwen", "served_name": "Qwen/Qwen3-8B"},
        {"id": "/cache/models/qwen", "served_name": " tiny.gguf , Qwen/Qwen3-8B"},
    ):
        assert f'"model": "{ModelConfig(**model).served_names[0]}"' in notes({"model": model})


def test_notes_list_what_is_not_ready_for_production() -> None:
    text = of("cpu-trial")
    warnings = ("Redis is one pod without a disk", "ray.gcsFaultTolerance", "own model cache", "one node without GPUs")
    for phrase in warnings:
        assert phrase in text
    assert "need pools with `colocate`" in text and "everybody who can reach" not in text


def test_keys_are_not_mentioned_where_auth_is_off() -> None:
    text = of("everything-off")
    assert "TANDEM_API_KEY" not in text and "gateway.auth is off: everybody" in text
    assert "/console" not in text and "helm -n" not in text


def test_a_production_install_has_fewer_warnings() -> None:
    text = of("rdma")
    for phrase in ("Redis is one pod", "gcsFaultTolerance", "own model cache", "slo.ttft_ms is 0"):
        assert phrase not in text
    assert "a key of your tenants file" in text and '"model": "llama-70b"' in text
    assert "NetworkPolicies do not apply" in text


def test_only_notes_of_colocated_pools_mention_nvlink() -> None:
    assert "CUDA IPC or shared memory" in of("one-node-nvlink")
    assert "CUDA IPC or shared memory" not in of("rdma")


def test_everything_on_leads_to_where_it_is() -> None:
    text = of("everything-on")
    assert "From outside: https://llm.example.org" in text and "Grafana's sidecar" in text
    assert "service/serving-gateway 8000:443" in text


def test_notes_show_how_to_call_gateways_with_tls() -> None:
    text = of("everything-on")
    assert "get secret serving-gateway-tls -o jsonpath='{.data.ca\\.crt}' | base64 -d > ca.crt\n" in text
    url = "https://serving-gateway.inference.svc:8000/v1/chat/completions"
    assert f"curl -i {url} --connect-to ::127.0.0.1: --cacert ca.crt --cert client.crt --key client.key" in text
    assert "https://127.0.0.1:8000/console" in text and "BackendTLSPolicy" in text and "CA in client-ca" in text
    assert "TLS" not in of("cpu-trial")


def test_workers_that_nobody_scrapes_are_spoken_of() -> None:
    assert "/metrics/targets" in of("mixed") and "/metrics/targets" not in of("cpu-trial")
