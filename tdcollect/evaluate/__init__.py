"""Test episodes: numbered, seeded, the same to the bit however they are run."""
