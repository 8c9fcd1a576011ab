"""`python -m loadtest bench`: workloads on several systems in alternation, and the report of their runs."""
