"""Code that runs on workers, delivered by value: a worker needs nothing but torchmonarch.

Modules here import the standard library and Monarch's public names only, and what is delivered with them.
"""
