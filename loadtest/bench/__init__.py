"""`python -m loadtest bench`: run workloads on several systems in alternation and report the runs."""
