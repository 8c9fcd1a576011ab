"""Set up how a program logs: the format of lines, the request that they name, and a limit on repeated lines.

`logging_setup.set_up_logging` is called once by each program. `log_context` tracks the request that the running code
works for, `log_formatters` formats records as text or JSON, `log_rate_limit` drops lines of which too many are alike,
and `log_handler` writes them. Read `logging_setup` first."""
