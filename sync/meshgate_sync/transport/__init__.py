"""Runs a relay on TCP connections and a store: frames, timers, a thread for the disk.

Never decides: it executes the commands of ``relay`` and reports their results. Standard library only: it runs on bare
workers.
"""
