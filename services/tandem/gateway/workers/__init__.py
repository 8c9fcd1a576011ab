"""The workers that this gateway knows, and its connection to each.

`worker_pool.WorkerPool` finds workers and keeps one `worker_link.WorkerLink` for each life of a worker.
"""
