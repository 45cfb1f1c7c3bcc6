"""The HTTP side of the gateway: the server, request parsing, authentication and routes.

Nothing here starts a process or uses Monarch.
"""
