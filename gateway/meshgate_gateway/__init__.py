"""The gateway: a server that authenticates clients, and for each session an engine process that drives Monarch.

The server never unpickles user data and never imports Monarch. ``docs/architecture.md`` shows the processes and what
passes between them.
"""
