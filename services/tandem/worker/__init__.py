"""Run a worker (import layer 5): an engine thread, a transfer thread and a gRPC service in one process, for every role.

`main` is the program of `tandem worker`; it calls `worker.start_worker`, which returns a `worker.Worker`, one
incarnation of a worker. Its parts are packages: `engine` runs steps on the engine thread, `kv` hands blocks over to and
from other workers, `gateways` serves gateways, `links` measures links, `ranks` and `model` load and hold the model,
`telemetry` exports metrics and spans, and `serve` runs workers in Ray Serve. Read `worker` first, then `engine.driver`
and `gateways.service`.
"""
