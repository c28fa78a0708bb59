"""What runs test episodes: the collector, its policy calls, seeds and checks."""
