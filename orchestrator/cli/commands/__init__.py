"""The signature of each `freshet` command, one file each: its arguments, options and help.

Not here: What a command does. It is imported when the command runs, so that `--help` is quick.
"""
