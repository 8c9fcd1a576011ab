"""Test how a `serveConfigV2` document becomes a deployment, and which errors it names, without starting Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tandem.core.config import Config, EngineConfig, WorkerConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.worker.addresses import own_host
from tandem.worker.ranks.ray_rank import _Rank
from tandem.worker.serve.application import build
from tandem.worker.serve.deployment import STOP_MARGIN_S, WorkerReplica, _advertise_address, pool_application
from tandem.worker.serve.pool_spec import PoolSpec, full_layer


@pytest.fixture(autouse=True)
def _nothing_from_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})


def deployment(**args: Any) -> Any:
    return build(args)._bound_deployment


def pool_of(**args: Any) -> PoolSpec:
    (pool,) = deployment(**args).init_args
    assert isinstance(pool, PoolSpec)
    return pool


def refusal(**args: Any) -> TandemError:
    with pytest.raises(TandemError) as caught:
        build(args)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    return caught.value


def test_a_pool_of_one_rank_on_cpu() -> None:
    made = deployment(pool="prefill", resources={"tandem-prefill": 1}, settings={"worker": {"drain_s": 50}})
    assert made.name == "tandem-prefill" and made.num_replicas == 1
    assert made.ray_actor_options == {"num_cpus": 1, "num_gpus": 0.0, "resources": {"tandem-prefill": 1.0}}
    deployment_config = made._deployment_config
    assert deployment_config.graceful_shutdown_timeout_s == 50 + STOP_MARGIN_S
    # Serve rounds up: one more worker for a pool of one to five.
    assert (deployment_config.max_surge_percent, deployment_config.max_ongoing_requests) == (20, 1)
    assert made._replica_config.placement_group_bundles is None


def test_ranks_share_a_machine_with_the_pools_resource() -> None:
    settings = {"model.device": "cuda", "engine.tensor_parallel": 4}
    made = deployment(pool="decode", settings=settings, resources={"tandem-decode": 0.5})
    replica = made._replica_config
    assert replica.placement_group_bundles == [{"CPU": 4, "GPU": 4, "tandem-decode": 0.5}]
    assert made.ray_actor_options == {"num_cpus": 1, "num_gpus": 1.0, "resources": {"tandem-decode": 0.5}}


def test_each_machine_of_a_worker_has_an_equal_part_of_the_ranks_and_the_pools_resource() -> None:
    settings = {"engine.tensor_parallel": 4, "engine.nnodes": 2}
    replica = deployment(pool="decode", settings=settings, resources={"tandem-decode": 1})._replica_config
    assert replica.placement_group_strategy == "PACK"
    assert replica.placement_group_bundles == [{"CPU": 2, "tandem-decode": 1}] * 2


@pytest.mark.parametrize("nnodes", [1, 2])
def test_an_actor_on_another_machine_advertises_its_own_address(nnodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.9")
    given = list[tuple[Config, str, int]]()
    monkeypatch.setattr("tandem.worker.rank_process.run", lambda *arguments: given.append(arguments) or 0)
    engine = EngineConfig(tensor_parallel=2, nnodes=nnodes)
    config = Config(engine=engine, worker=WorkerConfig(host="0.0.0.0", advertise_address="10.0.0.1:7"))
    assert _Rank().follow(config, "10.0.0.1:5", 1) == 0
    ((used, address, rank),) = given
    assert (address, rank) == ("10.0.0.1:5", 1)
    assert own_host(used.worker) == ("10.0.0.1" if nnodes == 1 else "10.0.0.9")


@pytest.mark.parametrize(
    ("settings", "given", "num_gpus"),
    [({}, None, 0), ({}, 0, 0), ({"model.device": "cuda"}, None, 1), ({"model.device": "cuda"}, 0.5, 0.5)],
)
def test_gpus_of_a_rank(settings: dict[str, Any], given: float | None, num_gpus: float) -> None:
    args = {} if given is None else {"num_gpus": given}
    assert deployment(pool="mixed", settings=settings, **args).ray_actor_options["num_gpus"] == num_gpus


def test_configuration_layers_override_in_order(tmp_path: Path) -> None:
    """The layers are the file, the environment of the process itself, and the document."""
    file = tmp_path / "config.yaml"
    file_config = {"worker": {"pool": "decode", "rack": "file", "zone": "file"}, "engine": {"block_size": 32}}
    file.write_text(yaml.safe_dump(file_config))
    pool = pool_of(pool="prefill", config=str(file), settings={"worker": {"rack": "document"}})
    environment = {"TANDEM_WORKER__ZONE": "pod", "TANDEM_WORKER__RACK": "pod"}
    worker = pool.resolve(environment).config.worker
    assert (worker.pool, worker.rack, worker.zone) == ("decode", "document", "pod")
    assert pool.resolve({}).config.worker.zone == "file" and pool.resolve({}).config.engine.block_size == 32


def test_a_pools_name_gives_its_role_and_any_other_name_requires_one() -> None:
    assert pool_of(pool="decode").resolve({}).config.worker.pool == "decode"
    big = pool_of(pool="big-prompts", settings={"worker.pool": "prefill"})
    assert big.resolve({}).config.worker.pool == "prefill" and big.deployment == "tandem-big-prompts"
    assert "worker.pool" in refusal(pool="big-prompts").message


def test_a_secret_of_the_environment_is_not_stored_by_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"TANDEM_REDIS__URL": "redis://:password@redis:6379"})
    assert "password" not in repr(deployment(pool="prefill").init_args)


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({}, "args.pool"),
        ({"pool": ""}, "args.pool"),
        ({"pool": "Prefill"}, "args.pool"),
        ({"pool": "-"}, "args.pool"),
        ({"pool": "p" * 41}, "args.pool"),
        ({"pool": 3}, "args.pool"),
        ({"pool": "prefill", "replicas": 2}, "args.replicas"),
        ({"pool": "prefill", "config": 3}, "args.config"),
        ({"pool": "prefill", "settings": ["x"]}, "args.settings"),
        ({"pool": "prefill", "settings": {3: {}}}, "args.settings"),
        ({"pool": "prefill", "num_gpus": True}, "args.num_gpus"),
        ({"pool": "prefill", "num_gpus": "1"}, "args.num_gpus"),
        ({"pool": "prefill", "num_gpus": -1}, "args.num_gpus"),
        ({"pool": "prefill", "num_gpus": float("nan")}, "args.num_gpus"),
        ({"pool": "prefill", "resources": {"tandem-prefill": "1"}}, "args.resources"),
        ({"pool": "prefill", "num_gpus": 1}, "num_gpus"),
        ({"pool": "prefill", "num_gpus": 2, "settings": {"model.device": "cuda"}}, "num_gpus"),
        ({"pool": "prefill", "num_gpus": 0, "settings": {"model.device": "cuda"}}, "num_gpus"),
        (
            {"pool": "prefill", "num_gpus": 0.5, "settings": {"model.device": "cuda", "engine.tensor_parallel": 2}},
            "num_gpus",
        ),
        ({"pool": "prefill", "settings": {"engine": {"block_sise": 16}}}, "engine.block_sise"),
        ({"pool": "prefill", "settings": {"engine": {"block_size": 12}}}, "engine.block_size"),
    ],
)
def test_an_invalid_argument_is_named(args: dict[str, Any], key: str) -> None:
    error = refusal(**args)
    assert error.param == key and key in error.message


def test_a_missing_file_is_named() -> None:
    assert "/nowhere/config.yaml" in refusal(pool="prefill", config="/nowhere/config.yaml").message


def test_a_dumped_configuration_is_read_back_unchanged() -> None:
    config = Config(worker=WorkerConfig(pool="decode", rack="r"))
    pool = PoolSpec(name="decode", above=(full_layer(config, "all"),))
    assert pool.resolve({"TANDEM_WORKER__RACK": "other", "TANDEM_ENGINE__BLOCK_SIZE": "64"}).config == config
    assert pool_application(pool, config, 3)._bound_deployment.num_replicas == 3


@pytest.mark.slow
def test_building_the_application_imports_neither_torch_nor_a_model() -> None:
    program = "import sys, tandem.worker.serve.application; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True)
    loaded = names.stdout.decode().split()
    assert "tandem.worker.serve.deployment" in loaded, names.stderr
    assert not {"torch", "transformers", "tandem.runtime", "nixl_cu12"} & set(loaded)


@pytest.mark.parametrize(("of_ray", "advertised"), [("10.0.0.7", "10.0.0.7"), ("127.0.0.1", "203.0.113.5")])
def test_a_worker_on_every_address_advertises_one_that_others_reach(
    of_ray: str, advertised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own address is loopback under `tandem serve`."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: of_ray)
    monkeypatch.setattr("tandem.worker.ranks.ray_rank.default_route_address", lambda wildcard: "203.0.113.5")
    assert _advertise_address(WorkerConfig(host="0.0.0.0", port=7)) == f"{advertised}:7"


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_worker_of_one_rank_starts_no_actor(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []

    async def nowhere(config: Config, model: object) -> None:
        launched.append(model)

    monkeypatch.setattr("tandem.worker.serve.deployment._replica_config", lambda config: config)
    monkeypatch.setattr("tandem.worker.serve.deployment._log_with_serve", lambda telemetry, worker: None)
    monkeypatch.setattr("tandem.worker.serve.deployment.launch_actors", lambda config: "actors")
    monkeypatch.setattr("tandem.worker.model.worker_model.load_worker_model", lambda config, launch: launch)
    monkeypatch.setattr("tandem.worker.worker.start_worker", nowhere)
    for name in ("prepare_process", "settle_process"):
        monkeypatch.setattr(f"tandem.worker.serve.deployment.{name}", lambda: None)
    pool = PoolSpec(name="prefill", above=(("test", {"engine.tensor_parallel": num_ranks}),))
    await WorkerReplica.__init__(SimpleNamespace(), pool)  # type: ignore[misc]
    assert launched == [None if num_ranks == 1 else "actors"]
