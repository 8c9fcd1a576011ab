"""Floor 5, the planner program: sees what a cluster is asked for and has it grow and shrink; never serves a request."""
