"""Decide how many prefill and decode workers one model needs; pure: no clock, no I/O, no randomness.

`scaler.Scaler` is the entry point: `decide` takes the `ClusterState` of one moment and returns a `Decision`, which the
planner or the simulator carries out. `worker_state` makes that state from what workers report. `forecast` predicts
demand; `queueing` and `burst_replay` compute the prefill workers that it needs, `decode_capacity` the decode workers;
`model_correction` learns where these models are wrong.
Read `cluster_state` and `decision` first, then `scaler`.
"""
