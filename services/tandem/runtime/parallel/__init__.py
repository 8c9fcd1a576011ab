"""One model on several ranks by tensor parallelism; never starts a process or knows how ranks are told what to do."""
