"""Tests of collectors on several processes and machines."""
