"""Worker processes that hold gymnasium envs, and what they share with the other backends.

Nothing here imports torch: a worker starts without it. ``envs`` imports from here, never the other
way round.
"""
