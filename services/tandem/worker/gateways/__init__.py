"""Serve gateways: receive their jobs, stream the events of these jobs, and publish which KV blocks this worker has
cached.

`service` serves the rpcs of worker.proto, `outbox` keeps the events of each gateway's jobs until its stream has sent
them, and `kv_event_publisher` publishes cached blocks to the prefix index. The entry points are `WorkerService`,
`WatchSessions` and `compose_publisher`. Read `service` first.
"""
