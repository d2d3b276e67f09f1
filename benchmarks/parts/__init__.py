"""What benchmarks share: jobs that they train, random pipelines, reference solvers, a shaped link, alternating turns.

Nothing here runs by itself.

Not here: what is measured, and its figures (a file of `benchmarks/` each).
"""
