"""The life of each request: admission, queueing, placement, attempts, feedback and deadlines.

Start with `dispatcher.Dispatcher`. It carries out what `tandem.flow` decides and feeds it the workers' events.
"""
