"""The files of an evaluation: written, read and held against each other."""
