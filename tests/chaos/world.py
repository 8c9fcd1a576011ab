"""Two prefill and two decode workers, two gateways and a Redis as processes, each worker behind a proxy, and what
injects their faults."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.load import Target
from tests.chaos.proxy import How, Proxies, Proxy
from tests.chaos.script import Fault
from tests.e2e.gateway.processes import Cluster, Gateway, Redis, Worker, cluster, until
from tests.e2e.gateway.tenants import UNLIMITED, key_of, tenants_file

KEYS = {name: key_of(name) for name in ("acme", "globex")}
NUM_EACH = 2
PORT = 7070
SETTINGS = (
    *("--served-model-name", "tiny", "--dtype", "float64", "--transfer-backend", "local", "--kv-cache-memory", "48MiB"),
    # Small steps: a long prompt is in the middle of its prefill for a while.
    *("--max-num-batched-tokens", "128", "--max-num-seqs", "8"),
    *("--worker-timeout-s", "3", "--lease-s", "3", "--pull-timeout-s", "5", "--drain-timeout-s", "3"),
    *("--gateway-grace-s", "3", "--worker-drain-s", "8"),
)


class World:
    """Programs by name: p0, p1, d0, d1, g0, g1. `struck`: what was done and when, for people."""

    def __init__(self, programs: Cluster, redis: Redis, tenants: Path, log: Callable[[str], None]) -> None:
        self.workers: dict[str, Worker] = {}
        self.gateways: dict[str, Gateway] = {}
        self._lives: dict[str, Target] = {}
        self._programs = programs
        self._redis = redis
        self._tenants = tenants
        self._log = log
        self._proxies = Proxies()
        self._before: dict[str, Proxy] = {}
        self._starting: list[Worker | Gateway] = []

    # ---- beginning and end

    def start(self) -> None:
        for index in range(NUM_EACH):
            for pool in ("prefill", "decode"):
                self._start_worker(f"{pool[0]}{index}", pool, index)
        for index in range(NUM_EACH):
            self._start_gateway(f"g{index}")
        self.wait_whole()

    def close(self) -> None:
        self._programs.stop()
        self._proxies.close()

    def _start_worker(self, name: str, pool: str, index: int) -> None:
        # An address of its own, so that a new life listens where the last one did.
        host = f"127.{77 + (pool == 'decode')}.{os.getpid() % 250 + 1}.{index + 1}"
        self._before[name], announced = self._proxies.before((host, PORT))
        where = ("--worker-host", host, "--worker-port", str(PORT), "--worker-advertise-address", announced)
        self.workers[name] = self._programs.worker(name, pool, *where)
        self._starting.append(self.workers[name])

    def _start_gateway(self, name: str) -> None:
        self.gateways[name] = self._programs.gateway(name, "--auth", "keys", "--tenants", str(self._tenants))
        self._starting.append(self.gateways[name])

    # ---- what is there

    def targets(self) -> list[Target]:
        """Gateways that clients may ask."""
        return list(self._lives.values())

    def wait_whole(self) -> None:
        """Everything runs, and both gateways see all workers."""
        for program in self._starting:
            program.wait_ready()
        self._starting.clear()
        for name, gateway in self.gateways.items():
            until(lambda gateway=gateway: live(gateway) == (NUM_EACH, NUM_EACH), f"{name} with all workers")  # type: ignore[misc]
            gateway.wait_serving()
            if name not in self._lives:
                self._lives[name] = Target(name, gateway.url, gateway.grpc_target)

    def nothing_is_left(self) -> None:
        """No block, lease, request or reservation is held anywhere."""
        for name, worker in self.workers.items():
            until(worker.is_idle, f"an idle {name}: {worker.books()}")
        for name, gateway in self.gateways.items():
            until(lambda gateway=gateway: gateway.metrics()["tandem_open_requests"] == 0, f"an idle {name}")  # type: ignore[misc]
        # Expire those of a killed gateway without waiting for their TTL.
        self._redis.lapse_reservations()
        until(lambda: not self._redis.open_reservations(), "settled reservations")

    def errors(self) -> list[str]:
        """Return the log lines that show a defect of a program."""
        return self._programs.log_lines("Traceback", "ERROR", "CRITICAL", "never retrieved", "was destroyed")

    # ---- what strikes

    def strike(self, fault: Fault) -> None:
        """Returns when the fault is over and all is whole again."""
        kind, _, what = fault.kind.partition(" ")
        match kind:
            case "kill" if what == "gateway":
                self._kill_gateway(f"g{fault.victim}")
            case "kill" if what == "redis":
                self._lose_redis(fault.lasts_s)
            case "kill":
                self._kill_worker(self._worker(what, fault.victim))
            case "stop":
                self._stall(self._worker(what, fault.victim), what)
            case "cut" | "blackhole":
                how: How = "reset" if kind == "cut" else "blackhole"
                self._cut(self._worker(fault.pool, fault.victim), what, how, fault.lasts_s)
            case "drain" if what == "decode":
                self._drain(self._worker(what, fault.victim))
            case _:
                for name in list(self.workers):
                    self._drain(name)
        self.wait_whole()

    def _worker(self, pool: str, rank: int) -> str:
        """By how much it has to do."""
        held = {name: worker.books().num_sequences for name, worker in self.workers.items() if name[0] == pool[0]}
        name = sorted(held, key=lambda name: (-held[name], name))[rank]
        self._log(f"    {name}, which has {held[name]} sequences")
        return name

    def _kill_worker(self, name: str) -> None:
        self.workers[name].kill()
        self._again(name)

    def _again(self, name: str) -> None:
        self.workers[name] = self._programs.again(self.workers[name])
        self._starting.append(self.workers[name])

    def _kill_gateway(self, name: str) -> None:
        self._lives.pop(name).was_killed = True
        self.gateways[name].kill()
        self._start_gateway(name)

    def _lose_redis(self, lasts_s: float) -> None:
        self._redis.stop()
        time.sleep(lasts_s)
        self._redis.start()

    def _stall(self, name: str, pool: str) -> None:
        """Until both gateways have given it up."""
        index = ("prefill", "decode").index(pool)
        self.workers[name].signal(signal.SIGSTOP)
        for gateway in self.gateways.values():
            until(lambda gateway=gateway: live(gateway)[index] < NUM_EACH, f"a gateway that misses {name}")  # type: ignore[misc]
        self.workers[name].signal(signal.SIGCONT)

    def _cut(self, name: str, whom: str, how: How, lasts_s: float) -> None:
        others = self.gateways if whom == "gateways" else self.workers
        pids = [program.pid for other, program in others.items() if other != name]
        proxy = self._before[name]
        if whom == "gateways":
            # A gateway may be about to open its connection again that an earlier fault has ended.
            until(lambda: self._proxies.do(proxy.count(pids)).result(), f"a gateway with a connection to {name}")
        count = self._proxies.do(proxy.cut(pids, how)).result()
        self._log(f"    {count} connections")
        time.sleep(lasts_s)
        self._proxies.do(proxy.heal()).result()

    def _drain(self, name: str) -> None:
        self.workers[name].signal(signal.SIGTERM)
        code = self.workers[name].wait()
        assert code == 0, f"{name} ended with {code}"
        self._again(name)
        self.wait_whole()


def live(gateway: Gateway) -> tuple[float, float]:
    """Prefill and decode workers that it sees."""
    return gateway.num_live("prefill"), gateway.num_live("decode")


@contextmanager
def whole_world(directory: Path, redis: Redis, model: Path, log: Callable[[str], None]) -> Iterator[World]:
    tenants = directory / "tenants.yaml"
    tenants.write_text(tenants_file(dict.fromkeys(KEYS, UNLIMITED)))
    with cluster(directory, redis.url, model, *SETTINGS) as programs:
        world = World(programs, redis, tenants, log)
        try:
            yield world
        finally:
            world.close()
