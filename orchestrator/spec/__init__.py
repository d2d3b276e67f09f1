"""The job spec: its sections, checks, errors and reference.

Not here: Anything that needs a cluster, a model or data.
"""
