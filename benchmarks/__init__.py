"""Measurements: direct Monarch, meshgate and Ray Client side by side. ``make bench``, docs/benchmarks.md.

``__main__`` runs the cases of ``cases``; each peer (``peers``) is a driver in a process of its own, asked for one round
at a time, so that peers take turns and drift of the machine meets all of them.
"""
