"""What runs on a worker: one Monarch host that comes up honestly and leaves nothing behind.

Needs the standard library and torchmonarch, nothing else, so that any image with torchmonarch can hold it.
"""
