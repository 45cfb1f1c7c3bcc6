"""Reloads the modules of a running process after a new version.

Standard library only: it runs on bare workers.
"""
