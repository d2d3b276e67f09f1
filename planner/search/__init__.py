"""Plan search: shapes, candidate cuts and their evaluation, shares of pipelines, standbys, steps to convergence.

Not here: The simulator and the partition programs that it calls.
"""
