"""Run workers as Ray Serve applications.

`application.build` is the entry point that a `serveConfigV2` document names: it returns the application of one pool of
workers. `pool_spec` holds the settings and resources that the workers of a pool share, and `deployment` runs one worker
in each replica. Requests do not pass through Serve. Read `application` first.
"""
