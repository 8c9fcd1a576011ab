"""One model on several ranks: the leader broadcasts packed batches, each follower computes its part."""
