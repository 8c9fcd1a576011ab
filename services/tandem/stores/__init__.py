"""Floor 4: everything kept in Redis (registry, prefix index, quotas, demand, targets), and the settings file."""
