"""Who may use the gateway and how much: API keys, the tenants file, quotas and fair shares.

`tenancy` composes the room; `quotas.TenantQuotas` reserves and settles, in Redis while it answers and locally while it
does not."""
