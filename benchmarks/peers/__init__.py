"""The measured drivers. Each is a program, ``python -m benchmarks.peers.<name>``; see ``benchmarks.peer``."""
