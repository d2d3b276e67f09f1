"""Faults on purpose: their kinds, the named places where one can happen, and their effects.

Not here: What a job does about a fault.
"""
