"""Define the values, errors and settings that all other packages share (import layer 0: imports nothing of Tandem).

`request` defines requests and the jobs made from them, `events` what workers report about a job, `ids` the identities
of both, and `errors.TandemError` every failure that a client may see. `config` defines the tree of settings, which
`settings.resolve` builds from files, environment and flags. `worker_load` and `link` are the reports that routers read;
`step_cost` predicts the time of a step. `clock` is the only file that reads the time. Read `ids`, `request` and
`events` first.
"""
