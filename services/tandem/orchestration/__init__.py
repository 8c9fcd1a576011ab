"""Floor 3, the life of requests at one gateway: admission, queueing, placement, attempts, retries and deadlines.

`director.RequestDirector` owns every open request; events go in, commands come out, and `now` is an argument. It
performs no I/O and reads no clock, so the gateway drives it with asyncio and the simulator with its event queue.
`request_state` is one request, `attempts` and `job_group` who works on it, `request_queue` who waits, `known_workers`
on what load requests are placed. Read `director` first, then `request_state`."""
