"""Activations at the end of the frozen prefix, kept from one epoch to the next: PipeTransformer's AutoCache.

What layers that are frozen as a whole make of a sample stays the same. A rank that holds the first stage keeps it, and
later goes on from there. Not here: which layers are frozen (`freezing/prefix`), and when samples are read (`data`).
"""
