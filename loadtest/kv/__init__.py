"""What moving KV costs: hand-offs, remote prefixes, drains and bare transfers."""
