"""Commands that a running job obeys: pause, end, move layers, change ranks, inject faults.

Not here: Changes of a job's spec, which a new start takes.
"""
