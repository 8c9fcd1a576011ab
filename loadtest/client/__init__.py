"""Generate load: workloads, schedules, HTTP calls, and the records of the answers."""
