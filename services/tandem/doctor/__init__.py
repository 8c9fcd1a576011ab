"""Floor 5: preflight checks of this machine and a cluster, which report problems with remedies and change nothing."""
