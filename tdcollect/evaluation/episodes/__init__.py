"""Running test episodes: the collector, its policy calls, random streams and checks."""
