"""Messages between ranks and controller: orders, reports and errors. Dataclasses without logic or torch.

Not here: how they travel (`workers/control/`).
"""
