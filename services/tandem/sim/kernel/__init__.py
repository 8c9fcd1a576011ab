"""Run discrete events in virtual time, in one total order, and compute a digest of what happened.

`event_queue.SimEventQueue` holds the clock and runs the events; an `Actor` (the clients, a gateway or a worker)
schedules them. Read `event_queue`.
"""
