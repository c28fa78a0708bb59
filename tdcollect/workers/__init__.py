"""Worker processes that hold gymnasium envs. Nothing here imports torch."""
