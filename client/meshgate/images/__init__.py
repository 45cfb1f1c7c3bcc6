"""Image steps: from a chain of steps or a Dockerfile to what has run on every host, once.

``dockerfile`` reads, ``plan`` resolves and digests, ``apply`` drives, ``on_host`` does. The chain itself is
``meshgate.jobs.image``.
"""
