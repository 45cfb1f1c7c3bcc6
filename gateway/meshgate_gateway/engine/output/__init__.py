"""What worker processes print: read from their connections, split into lines, folded.

``worker_streams`` reads the connections, including the last lines of a process that dies; ``lines`` splits and folds.
This folder knows processes only by mesh number and rank, and never sends to the client itself.
"""
