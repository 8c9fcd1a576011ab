"""Manage the life of requests at one gateway (import layer 3): admission, queueing, placement, attempts and retries.

`director.RequestDirector` owns every open request; events go in, commands come out, and `now` is an argument. It
performs no I/O and reads no clock, so the gateway drives it with asyncio and the simulator with its event queue.
`request_state` is the state machine of one request, `attempts` and `job_group` track its jobs at workers,
`request_queue` holds the requests that wait, and `known_workers` counts the load that placements add to workers. Read
`director` first, then `request_state`."""
