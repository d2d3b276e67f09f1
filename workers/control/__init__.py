"""Traffic between a training rank and the controller: mailbox, reports, the rank's current activity.

Not here: the messages themselves (`workers/protocol/`).
"""
