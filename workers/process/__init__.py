"""Surroundings of a rank's process: memory, name lookups, import paths, stacks.

Not here: anything about training.
"""
