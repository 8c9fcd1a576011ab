"""Floor 2, which workers a request goes to; never asks one."""
