"""Run one measurement: `python -m loadtest COMMAND`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple


class _Command(NamedTuple):
    """Name the module of a command and say what it measures. `module` defines `main(argv)`, and is imported only when
    the command is run."""

    module: str
    doc: str


_COMMANDS = {
    "autoscale": _Command(
        "loadtest.cluster.autoscale", "autoscalers against fixed numbers of workers, in virtual time"
    ),
    "bench": _Command("loadtest.bench.bench", "compare systems on the same workloads"),
    "load": _Command("loadtest.load.load", "a mix or a trace against an endpoint that runs already"),
    "compare": _Command("loadtest.load.compare", "two load tests side by side, and which differences are noise"),
    "frontend": _Command(
        "loadtest.gateway.frontend_bench", "cost of the gateway's HTTP front end with nothing behind it"
    ),
    "fairness": _Command("loadtest.cluster.fairness", "charges for KV time between tenants, in virtual time"),
    "neighbour": _Command("loadtest.gateway.neighbour", "what one tenant's attack on the gateway costs another tenant"),
    "offline": _Command("loadtest.engine.offline_command", "workloads on our engine in this process, with split steps"),
    "model": _Command("loadtest.engine.model_steps", "steps of a whole model beside their roofline time"),
    "experiment": _Command(
        "loadtest.fidelity.disaggregation_experiment", "monolithic, chunked, disaggregated under the same traffic"
    ),
    "joins": _Command("loadtest.cluster.joins", "cost of the pairs that a gateway tests as workers join"),
    "registry": _Command("loadtest.cluster.registry", "cost of worker discovery in Redis as a cluster grows"),
    "lanes": _Command(
        "loadtest.cluster.lanes", "a chat beside batch requests, by what a busy worker does, in virtual time"
    ),
    "drills": _Command("loadtest.cluster.drills", "four mixes before and after lanes and fair queues, in virtual time"),
    "index": _Command("loadtest.cluster.index", "lookup, cold start, staleness and bytes of the prefix index"),
    "fidelity": _Command("loadtest.fidelity.fidelity", "error of the simulator: fitted on one run, it predicts others"),
    "report": _Command("loadtest.bench.report_command", "print the stored JSON of a bench again"),
    "peers": _Command("loadtest.peers.command", "install peers, or list the installed ones"),
    "gguf": _Command("loadtest.engine.gguf_speed", "prefill and decode of a GGUF file, beside llama.cpp"),
    "handoff": _Command("loadtest.kv.handoff", "prefill and KV transfer between two workers, and the hidden share"),
    "remote-prefix": _Command("loadtest.kv.remote_prefix", "prompts computed against prompts read from another worker"),
    "placement": _Command("loadtest.cluster.placement", "cost of one placement as a cluster grows"),
    "preempt": _Command("loadtest.cluster.preempt", "a question to a worker full of batch answers: TTFT and pauses"),
    "rebalance": _Command("loadtest.cluster.rebalance", "running requests after a decode worker was replaced"),
    "spread": _Command("loadtest.cluster.spread", "running requests after a decode worker drained, on real processes"),
    "routing": _Command("loadtest.cluster.routing", "routing policies on a trace, in virtual time"),
    "drain": _Command("loadtest.kv.drain", "drain of a decode worker into another: migrations and client gaps"),
    "kills": _Command("loadtest.cluster.kills", "killed workers: the pause of their streams, divided into its parts"),
    "scale": _Command("loadtest.cluster.scale", "cost of a simulated request against the size of the cluster"),
    "overhead": _Command("loadtest.gateway.overhead", "latency that HTTP, gateway, gRPC and worker add to the engine"),
    "screenshots": _Command("loadtest.screenshots.screenshots", "the pictures of the documents, from a real cluster"),
    "startup": _Command("loadtest.engine.startup", "time from the start of `tandem serve` to its first answer"),
    "telemetry": _Command("loadtest.telemetry.telemetry", "cost of telemetry per engine step and streamed token"),
    "auth": _Command("loadtest.gateway.auth_cost", "cost of peer authentication per call to a worker"),
    "gpu-transfer": _Command(
        "loadtest.kv.gpu_transfer", "NIXL between two processes on one GPU against a loop of copies"
    ),
    "transfer": _Command("loadtest.kv.transfer", "the bandwidth of KV reads against bare ones of the same descriptors"),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] not in _COMMANDS:
        is_help = bool(argv) and argv[0] in ("-h", "--help")
        lines = [f"  {name:<14} {command.doc}" for name, command in _COMMANDS.items()]
        text = "\n".join(["usage: python -m loadtest COMMAND ...", "", *lines, ""])
        (sys.stdout if is_help else sys.stderr).write(text)
        return 0 if is_help else 2
    run: Callable[[Sequence[str]], int] = import_module(_COMMANDS[argv[0]].module).main
    return run(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
