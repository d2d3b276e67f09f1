"""Simulates a schedule: costs of actions and messages, start and end of each action, memory per rank on its device and
its host.

Not here: Any choice between plans.
"""
