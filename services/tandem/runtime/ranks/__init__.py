"""Run one model on several ranks: the leader broadcasts packed batches, each follower computes its part."""
