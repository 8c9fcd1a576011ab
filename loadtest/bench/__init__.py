"""Run workloads on several systems in alternation and report the runs: `python -m loadtest bench`."""
