"""Benchmarks that compare meshgate with direct Monarch and Ray Client: ``make bench``, docs/benchmarks.md.

``__main__`` runs the cases of ``cases``. Each peer (``peers``) is a driver in its own process that runs one round at a
time, so that peers take turns and drift of the machine affects all of them.
"""
