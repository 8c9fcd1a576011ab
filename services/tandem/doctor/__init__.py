"""Preflight checks of this machine and of a cluster, which report problems with remedies and change nothing.

The room owns the checks of `tandem doctor` and is floor 5 of the import layers. `checks.list_checks` is the entry
point: it builds all checks from the settings, `runner.run_checks` runs them, and `report` formats what they found. Read
`runner` first, then `finding`. In each other module, `read_...` functions collect facts, and `judge_...` functions turn
facts into findings."""
