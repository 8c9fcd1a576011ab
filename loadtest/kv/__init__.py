"""Cost of moving KV: hand-offs, remote prefixes, drains and raw transfers."""
