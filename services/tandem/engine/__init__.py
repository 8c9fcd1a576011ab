"""Join scheduler, block pool and hand-offs of one worker into pure state: begin a step, finish it, transfer KV."""
