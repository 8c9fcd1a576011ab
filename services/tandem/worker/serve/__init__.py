"""Workers as Ray Serve applications: pool specification, deployment, and the application of one pool."""
