"""What an installation says next: commands with the release's own names, and what is not ready yet; never a promise."""

from __future__ import annotations

import yaml

from tests.chart.release import CI, NAMESPACE, ci, notes


def of(name: str) -> str:
    return notes(yaml.safe_load(CI[name].read_text()))


def test_the_way_to_a_first_answer() -> None:
    told = of("cpu-trial")
    trial = ci("cpu-trial")
    service = trial.one("gateway-service")
    assert f"port-forward service/{service['metadata']['name']} 8000:80" in told
    assert "curl -i http://127.0.0.1:8000/v1/chat/completions" in told and '"model": "smollm2-135m-instruct"' in told
    assert 'authorization: Bearer $TANDEM_API_KEY"' in told
    secret = trial.one("tenants-secret")
    assert f"get secret {secret['metadata']['name']} -o jsonpath='{{.data.key}}'" in told
    assert "http://127.0.0.1:8000/console" in told and "gRPC is on port 8001" in told
    assert f"-n {NAMESPACE} exec deploy/{trial.one('gateway-deployment')['metadata']['name']} -- tandem doctor" in told
    assert "helm -n inference test rel" in told and "dashboards.enabled" in told


def test_what_is_not_ready_yet_is_said() -> None:
    told = of("cpu-trial")
    for said in ("Redis is one pod without a disk", "ray.gcsFaultTolerance", "own model cache", "validated"):
        assert said in told
    assert "need pools with `colocate`" in told and "everybody who can reach" not in told


def test_keys_are_not_spoken_of_where_nobody_asks_for_them() -> None:
    told = of("everything-off")
    assert "TANDEM_API_KEY" not in told and "gateway.auth is off: everybody" in told
    assert "/console" not in told and "helm -n" not in told


def test_a_set_up_for_production_is_told_less() -> None:
    told = of("rdma")
    for said in ("Redis is one pod", "gcsFaultTolerance", "own model cache", "slo.ttft_ms is 0"):
        assert said not in told
    assert "a key of your tenants file" in told and '"model": "llama-70b"' in told
    assert "NetworkPolicies do not apply" in told


def test_only_colocated_pools_are_promised_nvlink() -> None:
    assert "CUDA IPC or shared memory" in of("one-node-nvlink")
    assert "CUDA IPC or shared memory" not in of("rdma")


def test_everything_on_leads_to_where_it_is() -> None:
    told = of("everything-on")
    assert "From outside: https://llm.example.org" in told and "Grafana's sidecar" in told
    assert "service/serving-gateway 8000:443" in told


def test_workers_that_nobody_scrapes_are_spoken_of() -> None:
    assert "/metrics/targets" in of("mixed") and "/metrics/targets" not in of("cpu-trial")
