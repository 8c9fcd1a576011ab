"""Decide who may use the gateway and how much: API keys, the tenants file, quotas and fair shares.

`tenants_file.parse_tenants` reads tenants and key hashes, `tenants_watch.TenantsWatch` reloads them when the file
changes, and `authenticator.ApiKeyAuthenticator` finds the tenant of a key. `quotas.TenantQuotas` reserves and settles
quota, in Redis while it answers and locally while it does not. `fairness_sync` exchanges with other gateways how much
each tenant was served. `gateway.main` composes these; read `quotas` first."""
