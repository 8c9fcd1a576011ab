"""Choose the workers of one request from the reports of all workers (import layer 2); calls no worker, reads no clock.

`router.place` is the entry point: given a `WorkerRanking` of the live workers and a `RoutingRequest`, it returns a
`Placement` or the reason why there is none. `candidates` shortlists workers, `cost` predicts seconds, and `picker`
decides. `kv_indexer` and `prefix_index` record which worker has which blocks cached; `pd_pairs` records between which
workers KV may move. `circuit_breaker` excludes workers and links that failed recently. Read `router` first, then
`worker_view` and `cost`.
"""
