"""The pages of the lab: suites, races, episodes, and the index of a folder."""
