"""Test `tandem doctor` as a whole: on this machine, against a Redis, and with wrong usage."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from tandem.cli import main
from tests.ports import free_port

_numbers = itertools.count()
COLOUR = "\x1b["
QUICK = (
    "python,settings,cpu,gpu,rdma,memlock,shared-memory,ports,advertise-address,nodes,guard,open-files,tenants,secret,tls,"
    "redis,workers,gateway,clock,pod,rbac"
)
"""All checks except the slow ones: `model` loads the model, `ucx` moves bytes between two processes."""


@pytest.fixture
def ports() -> list[str]:
    """Return free ports: other programs on this machine may use the default ones."""
    return ["--port", str(free_port()), "--grpc-port", str(free_port())]


def findings_by_check(capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(capsys.readouterr().out)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("only", [QUICK, pytest.param("", marks=pytest.mark.nightly)], ids=["quick", "all"])
def test_this_machine_is_well(only: str, ports: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--only", only, *ports])
    found = findings_by_check(capsys)
    assert (code, [f for each in found.values() for f in each if f["verdict"] == "fail"]) == (0, [])
    assert only or {finding["verdict"] for finding in (*found["ucx"], *found["model"])} <= {"ok", "warn"}
    for check in ("python", "packages", "ports", "redis", "cpu", "shared-memory", "settings"):
        assert {finding["verdict"] for finding in found[check]} <= {"ok", "warn"}, check
    for check in ("gpu", "workers", "gateway", "pod", "rbac", "clock"):
        assert [finding["verdict"] for finding in found[check]] == ["skip"], check


def test_what_fails_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = ["--redis-url", f"unix://{tmp_path}/none.sock"]
    assert main(["doctor", "--only", "redis,workers", *away]) == 1
    out = capsys.readouterr().out
    assert "fail  redis" in out and "-> check that it runs" in out and COLOUR not in out
    assert "skip  workers" in out and "Redis does not answer" in out
    assert main(["doctor", "--only", "redis"]) == 0


def test_a_check_is_also_found_by_the_other_names_in_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--only", "cuda,python"]) == 0
    assert {"gpu", "cuda", "python", "packages"} == findings_by_check(capsys).keys()
    assert main(["doctor", "--json", "--only", "pairs"]) == 0
    assert findings_by_check(capsys).keys() == {"pairs"}, "without --pairs too"


def test_warnings_fail_with_strict(capsys: pytest.CaptureFixture[str]) -> None:
    warned = ["doctor", "--only", "settings", "--no-kv-digests"]
    assert main(warned) == 0
    assert main([*warned, "--strict"]) == 1
    assert "warn  settings  handoff.digests is off" in capsys.readouterr().out


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["doctor", "--only", "settings"]) == 0
    assert f"{COLOUR}32mok" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["doctor", "--only", "settings"]) == 0
    assert COLOUR not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "redis,hair"], "--only hair: there is no such check; known are python, packages, settings"),
        (["--transfer-require", "magic"], "transfer.require"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_pairs_are_few_or_all() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--pairs", "--all-pairs"])


@pytest.mark.redis
def test_a_redis_without_workers(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--redis-url", redis_url, "--namespace", f"doctor{next(_numbers)}"]
    assert main(["doctor", "--json", "--pairs", "--only", "redis,workers,clock,pairs", *here]) == 0
    found = findings_by_check(capsys)
    assert {check: each[0]["verdict"] for check, each in found.items()} == {
        "redis": "ok",
        "workers": "warn",
        "fingerprints": "skip",
        "roles": "skip",
        "clock": "ok",
        "pairs": "skip",
    }
