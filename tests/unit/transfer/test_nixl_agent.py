"""Test loading NIXL: a missing part is reported with its fix, and the user's own settings win."""

from __future__ import annotations

import os

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.transfer import nixl_agent
from tandem.transfer.nixl_agent import open_agent
from tandem.transfer.nixl_transport import memory_type


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace the process environment for this test."""
    own: dict[str, str] = {"HOME": "/"}
    monkeypatch.setattr(os, "environ", own)
    return own


def test_a_missing_library_is_reported_with_its_fix(environment, monkeypatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("no_such_nixl",))
    with pytest.raises(TandemError, match="pip install nixl-cu12") as error:
        open_agent("x.1")
    assert error.value.kind is ErrorKind.UNSUPPORTED


def test_only_what_is_unset_is_set(environment, monkeypatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ())
    environment["UCX_LOG_LEVEL"] = "debug"
    with pytest.raises(TandemError):
        open_agent("x.1")
    assert environment["UCX_LOG_LEVEL"] == "debug"
    assert environment["UCX_LOG_FILE"] == "stderr"
    assert "NIXL_CONFIG_FILE" not in environment
    assert "UCX_TLS" not in environment


def test_a_home_that_may_not_be_searched_is_not(environment, monkeypatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ())

    def refuse(path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(TandemError):
        open_agent("x.1")
    assert environment["NIXL_CONFIG_FILE"] == os.devnull


class Bindings:
    """NIXL's bindings and its Python module in one, on a machine where only some backends work."""

    def __init__(self, *working: str) -> None:
        self.nixlNotFoundError = LookupError
        self.nixlRemoteDisconnectError = ConnectionError
        self._working = working
        self.tried: list[str] = []
        self.backends: dict[str, int] = {}

    def nixl_agent_config(self, *, backends: list[str], **_: object) -> list[str]:
        return backends

    def nixl_agent(self, name: str, backends: list[str]) -> Bindings:
        self.tried += backends
        if backends[0] not in self._working:
            raise LookupError("NIXL_ERR_NOT_FOUND")
        self.backends = dict.fromkeys(backends, 1)
        return self


@pytest.fixture
def bindings(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Bindings:
    made = Bindings("UCX")
    monkeypatch.setattr(nixl_agent, "_find_package", lambda: "nixl")
    monkeypatch.setattr(nixl_agent.importlib, "import_module", lambda name: made)
    return made


def test_the_first_backend_that_works_is_used(bindings: Bindings) -> None:
    agent = open_agent("x.1", ("LIBFABRIC", "UCX"))
    assert (agent.backend, bindings.tried) == ("UCX", ["LIBFABRIC", "UCX"])
    assert agent.disconnected == (ConnectionError,)


def test_what_is_wrong_with_each_backend_is_named(bindings: Bindings) -> None:
    with pytest.raises(TandemError, match=r"LIBFABRIC: NIXL_ERR_NOT_FOUND; .* needs libfabric.so.1") as error:
        open_agent("x.1", ("LIBFABRIC",))
    assert error.value.param == "transfer.nixl_backends"


@pytest.mark.parametrize(("device", "memory"), [("cpu", ("DRAM", 0)), ("cuda:3", ("VRAM", 3)), ("cuda", ("VRAM", 0))])
def test_devices_have_names_in_nixl(device: str, memory: tuple[str, int]) -> None:
    assert memory_type(device) == memory


@pytest.mark.parametrize("device", ["", "meta", "cpu:1"])
def test_an_unknown_device_is_an_error(device: str) -> None:
    with pytest.raises(ValueError, match="knows memory"):
        memory_type(device)
