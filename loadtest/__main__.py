"""`python -m loadtest COMMAND`: hands over to one measurement; measures nothing itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple


class _Command(NamedTuple):
    """`module` has a `main(argv)` and is imported only when it is asked for."""

    module: str
    doc: str


_COMMANDS = {
    "autoscale": _Command(
        "loadtest.cluster.autoscale", "autoscalers against fixed numbers of workers, in virtual time"
    ),
    "bench": _Command("loadtest.bench.bench", "compare systems on the same workloads"),
    "load": _Command("loadtest.load.load", "a mix or a trace against an endpoint that runs already"),
    "compare": _Command("loadtest.load.compare", "two load tests side by side, and which differences are noise"),
    "door": _Command("loadtest.gateway.frontend_bench", "what the gateway's HTTP costs with nothing behind it"),
    "offline": _Command("loadtest.engine.offline_command", "workloads on our engine in this process, with split steps"),
    "model": _Command("loadtest.engine.model_steps", "steps of a whole model beside the least time that they can take"),
    "experiment": _Command(
        "loadtest.fidelity.disaggregation_experiment", "monolithic, chunked, disaggregated under the same traffic"
    ),
    "registry": _Command("loadtest.cluster.registry", "what finding workers costs Redis as a cluster grows"),
    "index": _Command("loadtest.cluster.index", "lookup, cold start, staleness and bytes of the prefix index"),
    "fidelity": _Command(
        "loadtest.fidelity.fidelity", "how far the simulator is off: fitted on one run, it predicts others"
    ),
    "report": _Command("loadtest.bench.report_command", "print again what a bench wrote as JSON"),
    "peers": _Command("loadtest.peers.command", "install peers, or say which are"),
    "handoff": _Command("loadtest.kv.handoff", "prefill, transfer and what of it is hidden, between two workers"),
    "loan": _Command(
        "loadtest.kv.remote_prefix", "prompts that a worker computes against those that it reads from another one"
    ),
    "placement": _Command("loadtest.cluster.placement", "what one placement costs as a cluster grows"),
    "routing": _Command("loadtest.cluster.routing", "ways to choose workers on a trace, in virtual time"),
    "drain": _Command(
        "loadtest.kv.drain", "a decode worker drains into another one: what moves, and what a client sees"
    ),
    "scale": _Command("loadtest.cluster.scale", "what a simulated request costs against the size of the cluster"),
    "overhead": _Command("loadtest.gateway.overhead", "what HTTP, gateway, gRPC and worker add to the bare engine"),
    "startup": _Command("loadtest.engine.startup", "`tandem serve` from its first instruction to its first answer"),
    "telemetry": _Command(
        "loadtest.telemetry.telemetry", "what telemetry adds to an engine's step and a streamed token"
    ),
    "trust": _Command("loadtest.gateway.auth_cost", "what the cluster's secret costs a call to a worker"),
    "gpu-transfer": _Command(
        "loadtest.kv.gpu_transfer", "NIXL between two processes on one GPU against a loop of copies"
    ),
    "transfer": _Command("loadtest.kv.transfer", "the bandwidth of KV reads against bare ones of the same descriptors"),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in _COMMANDS:
        is_asked = bool(argv) and argv[0] in ("-h", "--help")
        lines = [f"  {name:<12} {command.doc}" for name, command in _COMMANDS.items()]
        text = "\n".join(["usage: python -m loadtest COMMAND ...", "", *lines, ""])
        (sys.stdout if is_asked else sys.stderr).write(text)
        return 0 if is_asked else 2
    run: Callable[[Sequence[str]], int] = import_module(_COMMANDS[argv[0]].module).main
    return run(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
