"""What coding agents use: the tools of ``meshgate mcp``, and ``meshgate call`` and ``run``, which run edited code.

Nothing here keeps state between two calls: sessions do, on the gateway.
"""
