"""The worker's side of its gateways.

`service` serves the rpcs of worker.proto, `outbox` keeps the events of each gateway's jobs until its stream has sent
them, and `kv_event_publisher` publishes to the prefix index which blocks this worker has cached. The entry points are
`WorkerService`, `WatchSessions` and `compose_publisher`. Read `service` first.
"""
