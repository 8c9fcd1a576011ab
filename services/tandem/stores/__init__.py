"""Keep everything that Tandem stores in Redis, and read the settings file (import layer 4).

`worker_registry` lists the workers; `prefix_index` holds which worker caches which blocks, `quota_store` the tenants'
quotas and the number of gateways, `service_counters` how much each tenant was served, `demand_store` what gateways
report to planners, and `replica_targets` what planners decide. All of them send commands through
`redis_client.RedisClient` and raise its StoreUnavailable when Redis does not answer. `embedded_redis` runs a private
server. Read `redis_client` first, then `worker_registry`.
"""
