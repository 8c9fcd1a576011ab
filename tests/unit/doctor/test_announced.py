"""Where workers say that they are."""

from __future__ import annotations

from pathlib import Path

from tandem.core.config import WorkerConfig
from tandem.doctor.announced import Announced, judge_announced, read_announced
from tandem.doctor.finding import Finding
from tests.unit.doctor.trees import system
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns

ANYWHERE = "0.0.0.0"


def judged(tmp_path: Path, host: str, announce: str = "", **variables: str) -> Finding:
    found = read_announced(WorkerConfig(host=host, announce=announce), system(tmp_path, {}, **variables))
    return judge_announced(found, host)


def test_an_address_of_this_machine(tmp_path: Path) -> None:
    found = read_announced(WorkerConfig(announce="[::1]:9"), system(tmp_path, {}))
    assert (found.told, found.addresses) == ("[::1]:9", ("::1",))
    assert_fine(judged(tmp_path, "127.0.0.1", "127.0.0.1:0"), "announce", "at 127.0.0.1:0, which is here")
    assert_fine(judge_announced(Announced("10.0.0.1:9", ("10.0.0.1",), True), ANYWHERE), "announce", "which is here")


def test_an_address_of_somebody_who_passes_on(tmp_path: Path) -> None:
    assert_fine(judged(tmp_path, ANYWHERE, "192.0.2.1:9"), "announce", "(192.0.2.1), which passes on to here")


def test_a_pod_tells_its_own(tmp_path: Path) -> None:
    assert_fine(judged(tmp_path, ANYWHERE, POD_IP="192.0.2.7"), "announce", "announced at 192.0.2.7")
    assert_fine(judged(tmp_path, ANYWHERE, "192.0.2.1:9", POD_IP="192.0.2.7"), "announce", "at 192.0.2.1:9")
    assert_skips(judged(tmp_path, "127.0.0.1", POD_IP="192.0.2.7"), "announce", "where they listen (127.0.0.1)")


def test_a_name_that_nobody_knows(tmp_path: Path) -> None:
    finding = judged(tmp_path, ANYWHERE, "no.such.host.invalid:9")
    assert_fails(finding, "announce", "cannot be resolved", "the other machines' DNS")


def test_a_loopback_for_others(tmp_path: Path) -> None:
    assert_warns(judged(tmp_path, ANYWHERE, "127.0.0.1:9"), "announce", "others reach themselves", "`hostname -I`")


def test_every_address_and_none_that_is_told(tmp_path: Path) -> None:
    for host in (ANYWHERE, "::"):
        assert_warns(judged(tmp_path, host), "announce", f"worker.host is {host}", "worker.announce=HOST:PORT")
