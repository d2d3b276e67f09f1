"""Proof from a run's files: no line of the log changed, no step missing or doubled, no sample used twice, no checkpoint
altered.

Not here: The fold that reports use: an auditor keeps its own.
"""
