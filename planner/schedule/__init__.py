"""The order of a step's actions as data: validation, passes, the execution graph, table files and the registry
of names.

Not here: How long anything takes.
"""
