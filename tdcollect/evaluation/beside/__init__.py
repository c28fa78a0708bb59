"""Evaluation beside a training that goes on: in a process of its own."""
