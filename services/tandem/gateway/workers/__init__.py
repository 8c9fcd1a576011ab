"""Discover the workers of the cluster, and hold this gateway's connection to each.

`worker_pool.WorkerPool` finds workers through the registry, connects to them and tests the links between prefill and
decode workers. `worker_link.WorkerLink` is the connection to one incarnation of a worker: it sends jobs and receives
their tokens. `pool_events` defines what the pool reports to the request driver. Read `worker_pool` first."""
