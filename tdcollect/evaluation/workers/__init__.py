"""Test episodes on several workers: local processes, or the actors of a Ray cluster."""
