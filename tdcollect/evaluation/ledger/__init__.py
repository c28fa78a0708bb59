"""The files of an evaluation: written, read and checked."""
