"""Shows and controls jobs in a browser and through REST.

Not here: Torch and workers: it reaches jobs through `orchestrator/client/job_client.py`.
"""
