"""Slots that are ready go on: collecting where envs take unlike times."""
