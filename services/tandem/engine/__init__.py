"""Floor 3, one worker's step as pure state: begin, finish, hand-off; never does I/O."""
