"""Decide whether a tenant may send a request now, and which waiting request is sent to workers next (import layer 2).

`request_queue.RequestQueue` orders the requests of one gateway, with a `fair_queue.FairQueue` per model and a
`tenant_queue.TenantQueue` per tenant and lane. `quota.TenantQuota` keeps one tenant's quota in memory, with the rules
that the quota in Redis follows; `tenant_quota_state.TenantQuotaState` holds a tenant's open reservations at one
gateway, real or simulated. `tenant` applies a tenant's limits to a request, `ttft_predictor` rejects
requests that would be too late, and `api_keys` formats and parses keys. Callers pass the time and own the stores. Read
`request_queue` and `quota` first.
"""
