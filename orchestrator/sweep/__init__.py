"""Sweeps: one job for each cell of a grid of settings, and a table of what came of them.

Not here: how a job runs (`orchestrator/client/`); each is a `freshet train` of its own.
"""
