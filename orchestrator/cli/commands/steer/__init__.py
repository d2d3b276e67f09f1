"""Commands that a running job obeys: pause, end, move layers, change ranks, inject faults.

Not here: The commands themselves, of which these are made (`orchestrator/commands/`); changes of a job's spec, which a
new start takes.
"""
