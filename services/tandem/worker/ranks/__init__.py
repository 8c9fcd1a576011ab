"""Tensor-parallel ranks beside the first one: starting them, and the channel to each.

Start with `rank_group.RankGroup`; `local_rank` and `ray_rank` are the two ways to start a rank.
"""
