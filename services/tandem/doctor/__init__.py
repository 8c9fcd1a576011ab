"""Check this machine and a cluster, and report problems with remedies; changes nothing (import layer 5).

The package has the checks of `tandem doctor`. `checks.list_checks` is the entry point: it builds all checks from the
settings, `runner.run_checks` runs them, and `report` formats what they found. Read `runner` first, then `finding`. In
each other module, `read_...` functions collect facts, and `judge_...` functions turn facts into findings.
"""
