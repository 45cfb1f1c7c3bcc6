"""The engine: one process a session, a Monarch root client that speaks the wire to its laptop.

User code, its imports, its output and Monarch's habit of ending its client stay in this process, away from the
server and from other sessions. ``python -m meshgate_gateway.engine --control-fd N`` is started by the server.
"""
