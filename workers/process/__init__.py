"""What a rank's process needs from its surroundings: memory, name lookups, import paths, stacks.

Not here: anything about training.
"""
