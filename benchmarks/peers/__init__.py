"""The drivers that are measured, each a program: ``python -m benchmarks.peers.<name>``, see ``benchmarks.peer``."""
