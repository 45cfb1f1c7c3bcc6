"""The ``meshgate`` command: ``app`` declares the commands, and one module implements each group.

Commands call the layers below and print; no other package imports this one.
"""
