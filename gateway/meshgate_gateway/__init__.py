"""The gateway: a server that authenticates, and for each session an engine that drives Monarch.

The server never unpickles what users send and never imports Monarch. ``docs/architecture.md`` shows the
processes and what passes between them.
"""
