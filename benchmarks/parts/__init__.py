"""What the benchmarks share: reference solvers, random pipelines, a shaped link, runs with alternating steps.

Nothing here runs by itself.
"""
