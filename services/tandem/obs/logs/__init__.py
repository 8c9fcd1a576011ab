"""How a program logs: format, context, rate limit and set-up."""
