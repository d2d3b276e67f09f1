"""Owns jobs: from a spec to a running, recovering, reported job, with its command line and its Python API.

Not here: Training itself, and the decisions of the planner.
"""
