"""Test the command line: a flag for every setting, the precedence of layers, and the errors of refused settings."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli import main
from tandem.cli.main import _parser
from tandem.cli.subcommands import SUBCOMMANDS
from tandem.core.config import Config, value_of
from tandem.core.settings import Setting, build, flags_of, settings
from tests.certificates import Authority

_OTHER = {
    "redis.url": "redis://elsewhere:6379",
    "redis.namespace": "other",
    "engine.block_size": "32",
    "engine.gpu_memory_utilization": "0.5",
    "engine.max_retained_fraction": "0.5",
    "lanes.batch_max_share": "0.5",
    "gateway.rebalance_min_gain": "0.3",
    "planner.percentile": "95",
    "planner.headroom": "0.3",
    "planner.groups": "prefill=fast,decode=wide:2",
    "worker.advertise_address": "elsewhere:50051",
    "worker.lanes": "standard,batch",
    "transfer.nixl_backends": "LIBFABRIC",
    "transfer.network_devices": "eth1,eth2",
    "engine.nnodes": "2",
    "engine.node_rank": "1",
}
_NODES = {"engine.tensor_parallel": "2", "engine.nnodes": "2", "engine.master_addr": "127.0.0.1"}
_WITH = {
    "engine.nnodes": {"engine.tensor_parallel": "2"},
    "engine.node_rank": _NODES,
}
"""Settings without which another value of a setting is invalid."""


def other_value(setting: Setting) -> str:
    """Return a valid value that is not the default."""
    if setting.key in _OTHER:
        return _OTHER[setting.key]
    if setting.choices:
        return next(choice for choice in setting.choices if choice not in (setting.default, "strict"))
    if setting.type in (int, float):
        return str(setting.default + 2)
    return "2MiB" if setting.type is not str else "other"


def config_printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Config:
    assert main(["config", *arguments]) == 0
    return build([("printed", yaml.load(capsys.readouterr().out, yaml.CSafeLoader))])


@pytest.mark.slow
@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.key)
def test_every_setting_has_flags_that_change_it_alone(setting: Setting, capsys: pytest.CaptureFixture[str]) -> None:
    others = _WITH.get(setting.key, {})
    beside = [word for key, value in others.items() for word in (flags_of()[key][0], value)]
    for flag in flags_of()[setting.key]:
        if setting.type is bool:
            given = [f"--no-{flag[2:]}" if setting.default else flag]
            expected: Any = not setting.default
        else:
            given = [flag, other_value(setting)]
            expected = value_of(build([("expected", {setting.key: given[1], **others})]), setting.key)
        changed = config_printed(capsys, *given, *beside)
        assert value_of(changed, setting.key) == expected != setting.default
        assert [s.key for s in settings() if value_of(changed, s.key) != s.default and s.key not in others] == [
            setting.key
        ]


def test_flags_beat_the_environment_and_that_beats_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("gateway: {port: 1, host: file}\nserve:\n  prefill: 5\n")
    monkeypatch.setenv("TANDEM_GATEWAY__PORT", "2")
    monkeypatch.setenv("TANDEM_SERVE__DECODE", "6")
    assert main(["config", "--config", str(file), "--decode", "7"]) == 0
    lines = [line.strip().split() for line in capsys.readouterr().out.splitlines()]
    printed = {words[0]: (words[1], words[3]) for words in lines if len(words) > 3}
    assert printed["port:"][0] in ("0", "2")  # the worker has one too
    assert printed["decode:"] == ("7", "command") and printed["prefill:"] == ("5", str(file))
    config = config_printed(capsys, "--config", str(file), "--decode", "7")
    assert (config.gateway.port, config.gateway.host) == (2, "file")
    assert (config.serve.prefill, config.serve.decode) == (5, 7)


def test_the_output_of_config_reads_back_as_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", "a'b: #c", "--disaggregation", "off", "--kv-cache-memory", "1536MiB", "--no-kv-digests"]
    first = config_printed(capsys, *given)
    main(["config", *given])
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert config_printed(capsys, "--config", str(file)) == first
    assert first.model.id == "a'b: #c" and first.gateway.disaggregation == "off"


@pytest.mark.parametrize(
    ("arguments", "error_text"),
    [
        (["config", "--block-size", "17"], "engine.block_size = 17 (from command line) must be a power of two"),
        (["worker", "--transfer-backend", "pigeon"], "must be one of auto, nixl, tcp, local"),
        (["gateway", "--port", "http"], "gateway.port = 'http' (from command line) must be a whole number"),
        (["serve", "--prefill", "0"], "serve.mixed"),
        (["gateway", "--port", "0"], "set --redis-url"),
        (
            ["gateway", "--port", "0", "--redis-url", "redis://127.0.0.1:1"],
            "set --tenants FILE, or serve everybody with",
        ),
        (
            ["gateway", "--port", "0", "--redis-url", "redis://h", "--tenants", "/nowhere.yaml"],
            "/nowhere.yaml: No such file",
        ),
        (["serve", "--port", "0", "--host", "0.0.0.0"], "require API keys with --auth keys"),
        (["serve", "--port", "0", "--tenants", "tenants.yaml"], "add --auth keys"),
        (["serve", "--config", "/nowhere/tandem.yaml"], "cannot read settings file /nowhere/tandem.yaml"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(
    arguments: list[str], error_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"tandem {arguments[0]}: ") and error_text in error


@pytest.mark.parametrize(
    ("text", "error_text"),
    [
        ("engine: {blok_size: 16}", "did you mean engine.block_size"),
        ("- a list", "must hold a mapping"),
        ("engine: [", "not valid YAML: line 1, column 10"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_bad_file_is_named(
    text: str | bytes, error_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["config", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error_text in error and "bad.yaml" in error


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TANDEM_GATEWAY_PORT", "1")
    assert main(["config"]) == 2
    assert "TANDEM_GATEWAY__PORT" in capsys.readouterr().err


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_examples_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out.replace("\\\n", " ")
    examples = [line.split("  (")[0].split(" > ")[0] for line in text.splitlines() if line.startswith("  tandem ")]
    assert examples
    for example in examples:
        _parser().parse_args(shlex.split(example)[1:])


def test_an_unknown_flag_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--blok-size=16"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--blok-size" in error and "did you mean --block-size?" in error


@pytest.mark.parametrize("arguments", [[], ["fly"], ["config", "--no-such-flag"]])
def test_an_unknown_command_line_explains_itself(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: tandem" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "module", "missing", "extra"),
    [
        ("chat", "tandem.cli.chat", "httpx", "tandem[gateway]"),
        ("gateway", "tandem.gateway.main", "uvloop", "tandem[gateway]"),
    ],
)
def test_a_missing_extra_is_named(
    command: str,
    module: str,
    missing: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setenv("TANDEM_GATEWAY__AUTH", "off")
    monkeypatch.setenv("TANDEM_GATEWAY__PORT", "0")  # another program may listen on the default port
    monkeypatch.setenv("TANDEM_REDIS__URL", "redis://127.0.0.1:1")
    assert main([command]) == 1
    assert f"{missing} is not installed: pip install '{extra}'" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "code"), [("key", 141), ("config", 0)])
def test_a_reader_that_has_enough_causes_no_traceback(command: str, code: int) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        program = [sys.executable, "-m", "tandem.cli", command]
        result = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (code, "")


def test_a_command_without_an_output_ends_well() -> None:
    program = shlex.join([sys.executable, "-m", "tandem.cli", "key"])
    result = subprocess.run(["sh", "-c", f"{program} >&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_config_imports_no_heavy_package() -> None:
    code = (
        "import sys, io, contextlib\nfrom tandem.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['config'])\n"
        "print(*[m for m in ('torch', 'ray', 'grpc', 'httpx', 'redis', 'uvloop') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_tls_files_that_cannot_be_used_are_refused_before_the_start(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path / "ca")
    files, other = authority.issue_for_gateway("one"), authority.issue_for_gateway("other")
    locked = tmp_path / "locked.key"
    encryption = ("-aes256", "-passout", "pass:secret", "-out", str(locked))
    subprocess.run(["openssl", "pkey", "-in", files.tls_key_file, *encryption], check=True, capture_output=True)
    pair = ("--ssl-certfile", files.tls_cert_file, "--ssl-keyfile")
    cases = {
        "gateway.tls_key_file is empty: TLS needs a certificate and its key": pair[:2],
        "gateway.tls_cert_file is empty": ("--ssl-ca-certs", str(authority.ca)),
        f"gateway.tls_cert_file: cannot use {files.tls_cert_file} with key {other.tls_key_file}: KEY_VALUES_MISMATCH": (
            *pair,
            other.tls_key_file,
        ),
        "with key /nowhere: No such file": (*pair, "/nowhere"),
        f"with key {locked}: ": (*pair, str(locked)),
        "gateway.tls_client_ca_file: cannot use /nowhere: No such file": (
            *(*pair, files.tls_key_file),
            *("--ssl-ca-certs", "/nowhere"),
        ),
    }
    for expected, flags in cases.items():
        base = ("--port", "0", "--grpc-port", "0", "--redis-url", "unix:///nowhere", "--auth", "off")
        assert main([command, *base, *flags]) == 2
        assert expected in capsys.readouterr().err


def test_a_flag_is_not_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--prefil", "1"])
    assert "did you mean --prefill?" in capsys.readouterr().err


def test_the_help_has_a_sentence_for_each_section(capsys: pytest.CaptureFixture[str]) -> None:
    """A dataclass without a docstring would print its signature."""
    with pytest.raises(SystemExit, match="0"):
        main(["config", "--help"])
    assert "Config(" not in capsys.readouterr().out
