"""What the benchmarks share: oracles to compare with, random pipelines, a shaped link, runs in turns.

Nothing here runs by itself.
"""
