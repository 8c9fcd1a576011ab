"""Generate requests and their due times, for the simulator and for load tests alike.

A workload is a mix, which describes classes of requests and how they arrive, or a trace of recorded requests.
`source.open_workload` is the entry point: it opens either by name and yields `ScheduledRequest` values. `mix` generates
the requests of a mix and `trace_reader` replays a trace; read `scheduled_request` and `mix` first. Everything generated
is a function of seeds (`seeded_random`), so that the same call yields the same requests."""
