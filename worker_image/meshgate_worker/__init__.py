"""Runs one Monarch host on a worker: reports when it is ready, and leaves no process behind.

It needs only the standard library and torchmonarch, so any image with torchmonarch can contain it.
"""
