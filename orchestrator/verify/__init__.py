"""Proof from the log: no step missing or doubled, no sample used twice, no checkpoint altered.

Not here: The fold that reports use: an auditor keeps its own.
"""
