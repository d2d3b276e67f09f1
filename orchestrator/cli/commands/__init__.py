"""The signature of each `freshet` command, one file each, in rooms by what a user does: start, watch, steer, results.

Not here: What a command does. It is imported when the command runs, so that `--help` is quick.
"""
