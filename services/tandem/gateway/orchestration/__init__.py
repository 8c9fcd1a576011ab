"""Run requests at the gateway: admit them, send their jobs to workers, and give their output to the front ends.

`tandem.orchestration` decides what happens to a request, without I/O; `driver.RequestDriver` carries out its commands
with asyncio and reports to it what workers send. `active_request.ActiveRequest` is the stream that a front end reads.
`demand` counts requests for the planners. Read `driver` first."""
