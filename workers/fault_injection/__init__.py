"""Fault injection: the kinds of fault, the named points where one can fire, and their effects.

Not here: how a job recovers from a fault.
"""
