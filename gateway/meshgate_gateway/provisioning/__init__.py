"""Jobs that a gateway creates for callers without permissions of their own, and access to the gateways of those jobs.

It reaches the Kubernetes API only through ``meshgate_kubernetes``, and Slurm only through ``meshgate_slurm``.
"""
