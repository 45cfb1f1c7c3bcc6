"""SlurmJob: workers on the nodes of a Slurm cluster, and the way to their gateway on a login node.

``job`` has the arguments. ``access`` is the way to the cluster: a gateway behind a URL, or a login node, where
``login_program`` starts and ends jobs by a program that ``ssh`` or this machine runs. ``dialer`` connects to gateways,
and ``waiting`` shows the queue.
This package never runs a command of Slurm's itself; ``meshgate_slurm`` does, on the login node.
"""
