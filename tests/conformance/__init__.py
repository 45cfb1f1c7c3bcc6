"""Checks that a program behaves the same on Monarch itself and through a gateway.

Each case is a small program against Monarch's documented behavior. ``python -m tests.conformance`` runs every case
twice in one run, on direct Monarch and on a meshgate ``ProcessJob``, and prints the results by area. Nothing here is
shipped.
"""
