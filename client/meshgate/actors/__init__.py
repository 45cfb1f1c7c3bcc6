"""``Actor``, ``endpoint`` and the inspection of actor classes, with and without torchmonarch.

Nothing here knows of a session, a gateway or a job.
"""
