"""Where workers say that they are, by the workers' own rule."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.core.config import WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.doctor.advertised_address import AdvertisedAddress, judge_announced, read_announced
from tandem.doctor.finding import Finding
from tandem.worker.advertise_address import advertised_address
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_warns

ANYWHERE = "0.0.0.0"


def told(worker: WorkerConfig, environ: Mapping[str, str]) -> str:
    return advertised_address(worker, worker.port, environ, lambda host: "127.0.0.1")


def judged(host: str, address: str = "", **variables: str) -> Finding:
    found = read_announced(WorkerConfig(host=host, advertise_address=address), variables, told)
    return judge_announced(found, host)


def test_an_address_of_this_machine() -> None:
    found = read_announced(WorkerConfig(advertise_address="[::1]:9"), {}, told)
    assert (found.address, found.leads_to) == ("[::1]:9", ("::1",))
    assert_fine(judged("127.0.0.1"), "advertise-address", "announced at 127.0.0.1, which is here")
    assert_fine(judged("127.0.0.1", "127.0.0.1:9"), "advertise-address", "announced at 127.0.0.1:9, which is here")
    routed = AdvertisedAddress("10.0.0.1:9", leads_to=("10.0.0.1",), is_here=True)
    assert_fine(judge_announced(routed, ANYWHERE), "advertise-address", "which is here")


def test_an_address_of_somebody_who_passes_on() -> None:
    assert_fine(
        judged(ANYWHERE, "192.0.2.1:9"), "advertise-address", "192.0.2.1:9 (192.0.2.1), which passes on to here"
    )


def test_a_pod_tells_its_own() -> None:
    assert_fine(judged(ANYWHERE, POD_IP="192.0.2.7"), "advertise-address", "announced at 192.0.2.7 ")
    assert_fine(judged(ANYWHERE, "192.0.2.1:9", POD_IP="192.0.2.7"), "advertise-address", "at 192.0.2.1:9")


def test_a_name_that_nobody_knows() -> None:
    finding = judged(ANYWHERE, "no.such.host.invalid:9")
    assert_fails(finding, "advertise-address", "cannot be resolved", "the other machines' DNS")


def test_a_loopback_for_others() -> None:
    """Also where it is the only address of a machine that listens at all."""
    for address in ("127.0.0.1:9", ""):
        assert_warns(judged(ANYWHERE, address), "advertise-address", "others reach themselves", "`hostname -I`")


def test_no_address_at_all() -> None:
    def lost(worker: WorkerConfig, environ: Mapping[str, str]) -> str:
        raise TandemError(ErrorKind.INVALID_REQUEST, "this machine has no way out")

    finding = judge_announced(read_announced(WorkerConfig(), {}, lost), ANYWHERE)
    assert_fails(finding, "advertise-address", "no way out", "POD_IP by the downward API")
