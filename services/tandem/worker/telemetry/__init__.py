"""What a worker measures of itself: gauges, job and step metrics, spans of jobs."""
