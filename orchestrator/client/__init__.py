"""A job from outside: start it, reach it, follow it, command it.

Not here: The controller that answers.
"""
