"""Test the merge of layers: which wins, where a value came from, and how a bad value is reported."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.config import Bytes, Config, EngineConfig, value_of
from tandem.core.config_rules import violations
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.settings import DEFAULT_LAYER, build, flags_of, from_environment, resolve, settings

KEYS = [leaf.key for leaf in settings()]


def refusal(*layers: tuple[str, dict[Any, Any]]) -> TandemError:
    with pytest.raises(TandemError) as caught:
        build(layers)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    return caught.value


def test_no_layers_is_the_default_tree() -> None:
    resolved = resolve([])
    assert resolved.config == Config()
    assert set(resolved.origins) == set(KEYS)
    assert set(resolved.origins.values()) == {DEFAULT_LAYER}


def test_later_layers_win_and_origins_name_them() -> None:
    file = {"engine": {"block_size": 32, "max_num_seqs": 8}, "model": {"id": "m"}}
    environment = {"engine.block_size": "64"}
    flags = {"engine.enable_chunked_prefill": False}
    resolved = resolve([("settings.yaml", file), ("environment", environment), ("flags", flags)])
    assert resolved.config.engine == EngineConfig(block_size=64, max_num_seqs=8, enable_chunked_prefill=False)
    assert resolved.config.model.id == "m"
    assert resolved.origins["engine.block_size"] == "environment"
    assert resolved.origins["engine.max_num_seqs"] == "settings.yaml"
    assert resolved.origins["engine.enable_chunked_prefill"] == "flags"
    assert resolved.origins["engine.kv_cache_memory"] == DEFAULT_LAYER


@pytest.mark.parametrize(
    ("key", "raw", "value"),
    [
        ("engine.block_size", "32", 32),
        ("engine.block_size", " 32 ", 32),
        ("engine.block_size", 32.0, 32),
        ("engine.kv_cache_memory", "512MiB", 512 << 20),
        ("engine.kv_cache_memory", 1 << 20, 1 << 20),
        ("handoff.lease_s", 3, 3.0),
        ("handoff.lease_s", "2.5", 2.5),
        ("handoff.digests", "off", False),
        ("handoff.digests", "Yes", True),
        ("gateway.disaggregation", False, "off"),  # a bare `off` in YAML
        ("gateway.disaggregation", "strict", "strict"),
        ("redis.url", "unix:///run/x.sock", "unix:///run/x.sock"),
        ("redis.url", "rediss://u:a,b@[fd00::1]:6380/0", "rediss://u:a,b@[fd00::1]:6380/0"),
        ("redis.url", "redis+cluster://:p@a:1,b:2", "redis+cluster://:p@a:1,b:2"),
    ],
)
def test_values_are_read_by_their_type(key: str, raw: object, value: object) -> None:
    got = value_of(build([("flags", {key: raw})]), key)
    assert got == value
    assert type(got) is type(value) or isinstance(got, Bytes)


@pytest.mark.parametrize(
    ("key", "raw", "allowed"),
    [
        ("engine.block_size", "many", "a whole number"),
        ("engine.block_size", 16.5, "a whole number"),
        ("engine.block_size", "1_6", "a whole number"),
        ("engine.block_size", True, "a whole number"),
        ("engine.block_size", None, "a whole number"),
        ("engine.tensor_parallel", 0, "a whole number of at least 1"),
        ("gateway.port", 65536, "a whole number of at least 0 and at most 65535"),
        ("handoff.lease_s", 0, "a finite number of more than 0"),
        ("engine.gpu_memory_utilization", "1.1", "a finite number of more than 0 and at most 1"),
        ("handoff.lease_s", "nan", "a finite number"),
        ("handoff.lease_s", "inf", "a finite number"),
        ("handoff.lease_s", [], "a finite number"),
        ("handoff.digests", "perhaps", "true or false"),
        ("handoff.digests", 2, "true or false"),
        ("model.id", 7, "text"),
        ("engine.kv_cache_memory", "lots", "a size such as"),
        ("engine.kv_cache_memory", -1, "a size such as"),
        ("engine.kv_cache_memory", "²", "a size such as"),
        ("model.device", "tpu", "one of cpu, cuda"),
        ("model.device", True, "one of cpu, cuda"),
        ("model.device", {}, "one of cpu, cuda"),
    ],
)
def test_a_bad_value_names_key_layer_value_and_what_is_allowed(key: str, raw: object, allowed: str) -> None:
    error = refusal(("settings.yaml", {key: raw}))
    assert error.param == key
    for part in (key, "settings.yaml", repr(raw), allowed):
        assert part in error.message


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("engine.block_sise", "engine.block_size"),
        ("engin.block_size", "engine.block_size"),
        ("gateway.block_size", "engine.block_size"),
        ("engin", "engine"),
        ("redis.ur", "redis.url"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key: str, near: str) -> None:
    error = refusal(("environment", {key: 1}))
    assert error.message == f"unknown setting {key} (from environment); did you mean {near}?"


def test_an_unknown_key_like_nothing_is_refused_without_a_suggestion() -> None:
    assert "did you mean" not in refusal(("flags", {"qqq.zzz": 1})).message


def test_malformed_layers_are_refused() -> None:
    assert "must be a mapping" in refusal(("file", {"engine": 3})).message
    assert "not the name of a section" in refusal(("file", {3: {}})).message
    assert "unknown setting engine.3" in refusal(("file", {"engine": {3: 4}})).message
    assert build([("file", {"engine": None})]) == Config()


@pytest.mark.parametrize(
    ("layer", "key"),
    [
        ({"engine.block_size": 12}, "engine.block_size"),
        ({"engine.max_num_batched_tokens": 8}, "engine.max_num_batched_tokens"),
        ({"engine.max_num_seqs": 0}, "engine.max_num_seqs"),
        ({"engine.max_model_len": 1}, "engine.max_model_len"),
        ({"engine.gpu_memory_utilization": 0.0}, "engine.gpu_memory_utilization"),
        ({"engine.gpu_memory_utilization": 1.1}, "engine.gpu_memory_utilization"),
        ({"engine.plan_depth": 3}, "engine.plan_depth"),
        ({"engine.plan_depth": -1}, "engine.plan_depth"),
        ({"model.device": "cuda", "model.quantization": "int8"}, "model.quantization"),
        ({"model.batch_invariant": True, "engine.tensor_parallel": 2}, "model.batch_invariant"),
        (
            {"model.device": "cuda", "model.batch_invariant": True, "engine.tensor_parallel": 4},
            "model.batch_invariant",
        ),
        ({"engine.tensor_parallel": 3, "engine.nnodes": 2}, "engine.nnodes"),
        ({"engine.nnodes": 2}, "engine.nnodes"),
        ({"engine.node_rank": 1, "engine.master_addr": "a"}, "engine.node_rank"),
        ({"engine.tensor_parallel": 4, "engine.nnodes": 2, "engine.node_rank": 1}, "engine.master_addr"),
        ({"engine.tensor_parallel": 2, "engine.nnodes": 2, "transfer.backend": "local"}, "transfer.backend"),
        ({"engine.tensor_parallel": 2, "engine.nnodes": 2, "engine.master_addr": "10.0.0.4"}, "worker.host"),
        ({"engine.master_port": 0}, "engine.master_port"),
        ({"model.device": "cuda", "model.dtype": "float64"}, "model.dtype"),
        ({"model.device": "cuda", "engine.kernels": "reference"}, "engine.kernels"),
        ({"model.device": "cuda", "transfer.backend": "local"}, "transfer.backend"),
        ({"transfer.nixl_backends": "UCX,GDS"}, "transfer.nixl_backends"),
        ({"transfer.nixl_backends": ""}, "transfer.nixl_backends"),
        ({"handoff.lease_s": 0}, "handoff.lease_s"),
        ({"handoff.lease_s": -1}, "handoff.lease_s"),
        ({"gateway.port": 65536}, "gateway.port"),
        ({"worker.lanes": "batch,nightly"}, "worker.lanes"),
        ({"worker.lanes": "batch,"}, "worker.lanes"),
        ({"worker.lanes": "batch, batch"}, "worker.lanes"),
        ({"worker.advertise_address": "10.0.0.7"}, "worker.advertise_address"),
        ({"worker.advertise_address": "worker:65536"}, "worker.advertise_address"),
        ({"gateway.max_queued": 0}, "gateway.max_queued"),
        ({"gateway.allowed_hosts": "a.example:8000"}, "gateway.allowed_hosts"),
        ({"gateway.allowed_hosts": "http://a.example"}, "gateway.allowed_hosts"),
        ({"gateway.allowed_hosts": "*a.example"}, "gateway.allowed_hosts"),
        ({"gateway.allowed_hosts": "a,,b"}, "gateway.allowed_hosts"),
        ({"gateway.allowed_hosts": "fd00::g"}, "gateway.allowed_hosts"),
        ({"worker.drain_s": -0.5}, "worker.drain_s"),
        ({"redis.url": "http://x"}, "redis.url"),
        ({"redis.url": "redis://a:6379,b:6379"}, "redis.url"),
        ({"redis.url": "rediss://a:b"}, "redis.url"),
        ({"redis.url": "rediss://[fd00::g]:6379"}, "redis.url"),
        ({"redis.url": "rediss://[fd00::1:6379"}, "redis.url"),
        ({"redis.url": "redis+cluster://a:1,b:65536"}, "redis.url"),
        ({"redis.namespace": "a{b}"}, "redis.namespace"),
        ({"redis.namespace": ""}, "redis.namespace"),
        ({"model.id": ""}, "model.id"),
        ({"serve.decode": 0}, "serve.mixed"),
        ({"serve.prefill": 0, "serve.mixed": 1, "gateway.disaggregation": "strict"}, "gateway.disaggregation"),
    ],
)
def test_rules_name_the_layer_that_broke_them(layer: dict[str, object], key: str) -> None:
    error = refusal(("flags", layer))
    assert error.param == key
    assert key in error.message
    assert "(from flags)" in error.message or "(from default)" in error.message


@pytest.mark.parametrize("hosts", ["*", "*.a.example, LLM.example", "10.0.0.1,[fd00::1],fd00::2", "a_b.c"])
def test_hosts_that_may_be_allowed(hosts: str) -> None:
    assert build([("flags", {"gateway.allowed_hosts": hosts})]).gateway.allowed_hosts == hosts


def test_every_broken_rule_is_reported() -> None:
    """Values outside their ranges are reported together; rules are checked when there is none."""
    ranges = refusal(("flags", {"engine.num_threads": "many", "gateway.port": -1}))
    assert "engine.num_threads = 'many'" in ranges.message
    assert "gateway.port = -1" in ranges.message
    rules = refusal(("flags", {"engine.block_size": 12, "redis.namespace": "a:b"}))
    assert "engine.block_size = 12" in rules.message
    assert "redis.namespace = a:b" in rules.message


def test_the_default_tree_breaks_no_rule() -> None:
    assert violations(Config()) == []
    assert build([("itself", {leaf.key: leaf.default for leaf in settings()})]) == Config()


def test_environment_takes_only_settings() -> None:
    environ = {"TANDEM_ENGINE__BLOCK_SIZE": "32", "TANDEM_TORCH_INDEX": "x", "PATH": "/bin"}
    assert from_environment(environ) == {"engine.block_size": "32"}
    assert build([("environment", from_environment(environ))]).engine.block_size == 32


def test_environment_with_one_underscore_is_refused() -> None:
    with pytest.raises(TandemError, match="write TANDEM_ENGINE__BLOCK_SIZE"):
        from_environment({"TANDEM_ENGINE_BLOCK_SIZE": "32"})


def test_environment_with_a_misspelt_name_is_refused() -> None:
    error = refusal(("environment", from_environment({"TANDEM_ENGINE__BLOK_SIZE": "32"})))
    assert "did you mean engine.block_size?" in error.message


def test_every_setting_has_flags_and_every_flag_one_setting() -> None:
    table = flags_of()
    assert list(table) == KEYS
    flags = [flag for names in table.values() for flag in names]
    assert len(set(flags)) == len(flags)
    switches = [leaf.key for leaf in settings() if leaf.type is bool]
    negated = {flag.replace("--", "--no-", 1) for key in switches for flag in table[key]}
    assert not negated & set(flags)
    for key, names in table.items():
        assert f"--{key.replace('.', '-').replace('_', '-')}" in names


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--model", "model.id"),
        ("--port", "gateway.port"),
        ("--gateway-port", "gateway.port"),
        ("--host", "gateway.host"),
        ("--worker-port", "worker.port"),
        ("--prefill", "serve.prefill"),
        ("--decode", "serve.decode"),
        ("--mixed", "serve.mixed"),
        ("--redis-url", "redis.url"),
        ("--block-size", "engine.block_size"),
        ("--kv-cache-memory", "engine.kv_cache_memory"),
        ("--max-num-batched-tokens", "engine.max_num_batched_tokens"),
    ],
)
def test_well_known_flags(flag: str, key: str) -> None:
    assert flag in flags_of()[key]


def test_every_setting_is_documented_and_its_section_frozen() -> None:
    assert all(leaf.doc for leaf in settings())
    for leaf in settings():
        with pytest.raises(AttributeError):
            setattr(getattr(Config(), leaf.section), leaf.name, leaf.default)


@given(st.dictionaries(st.sampled_from(KEYS), st.none() | st.booleans() | st.integers() | st.floats() | st.text()))
def test_any_values_give_a_valid_tree_or_a_typed_error(layer: dict[str, object]) -> None:
    try:
        config = build([("flags", layer)])
    except TandemError as error:
        assert error.kind is ErrorKind.INVALID_REQUEST
        assert error.param in KEYS
    else:
        assert violations(config) == []


@given(st.integers(0, 2**50))
def test_sizes_are_read_back_as_they_print(size: int) -> None:
    assert Bytes.parse(str(Bytes(size))) == size


@pytest.mark.parametrize(
    ("text", "size"), [("1.5GiB", 3 << 29), ("2k", 2000), ("4 KiB", 4096), ("100B", 100), ("7", 7), ("1GB", 10**9)]
)
def test_sizes(text: str, size: int) -> None:
    assert Bytes.parse(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.2.3", "MiB", "1XiB", "1e9", "."])
def test_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        Bytes.parse(text)


def test_impossible_speculation_is_refused() -> None:
    assert "speculative.ngram_min" in refusal(("flags", {"speculative.ngram_min": 5})).message
    for name in ("num_tokens", "max_batch_tokens", "ngram_min"):
        assert refusal(("flags", {f"speculative.{name}": 0})).param == f"speculative.{name}"
    assert flags_of()["speculative.method"] == ("--speculative-method",)


def test_ranks_are_divided_among_machines() -> None:
    engine = EngineConfig(tensor_parallel=8, nnodes=2, node_rank=1)
    assert engine.ranks_per_node == 4 and engine.node_ranks == range(4, 8)
    assert EngineConfig(tensor_parallel=3).node_ranks == range(3)
