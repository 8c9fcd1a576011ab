"""The discrete-event core: virtual time, one total order of events, and a digest of what happened.
`event_queue.SimEventQueue` holds the clock and runs the events; an `Actor` is a process that schedules them. Read
`event_queue`."""
