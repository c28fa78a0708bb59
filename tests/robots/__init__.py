"""Tests with robots' packages, each in an environment of its own: `make lerobot`."""
