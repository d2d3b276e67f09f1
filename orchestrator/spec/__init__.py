"""The job spec: its sections, rules, errors and reference.

Not here: Anything that needs a cluster, a model or data.
"""
