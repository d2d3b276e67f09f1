"""Commands before and at a job's start: train it, plan it, measure it or the machine, rehearse it.

Not here: Commands on a job that runs.
"""
