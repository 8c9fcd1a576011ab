"""Floor 5, the worker: an engine thread, a transfer thread and a gRPC service in one process, for every role.

`main` is the program and `worker.Worker` one life of it, composed of the sub-rooms: `engine` runs steps, `kv` hands
blocks over, `gateways` speaks to gateways, `links` measures links, `ranks` and `model` hold the model. Read `worker`,
then `engine.driver` and `gateways.service`."""
