"""The table of commands to a running job: a file per command, with its fields, words, what-if change and answers.

Not here: What a command does to the job, which the controller decides.
"""
