"""Check and time every kernel against the machine's limits and torch's own: `python -m tandem_kernels.bench`.

This package imports nothing of `tandem`. `__main__` runs the bench, `checks` compares kernels with the reference, and
`runner` times the cases that `attention` and `rows` build. `grid` holds the measured sizes, `autotune` searches tile
sizes. Read `case` first, then `runner`.
"""
