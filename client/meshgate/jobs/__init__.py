"""Jobs: a specification of hosts, and the machines that run it once it is applied.

``trait`` has the rules of every job, ``saved`` and ``cached`` the job file; ``local``, ``process`` and ``kubernetes``
are the job types. This package starts, finds and ends gateways; it never sends work to hosts itself. It imports none of
its modules, since ``meshgate ls`` needs only the registry.
"""
