"""Turns what the gateway reports as failed into errors: those that calls raise, and faults, which end the program.

Nothing here sends anything to the gateway.
"""
