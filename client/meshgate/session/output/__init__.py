"""Prints what actors print, on the driver's terminal, in its notebook or to its files.

Nothing here talks to the gateway: lines come in, and text goes out on a thread of its own.
"""
