"""The engine: one process per session, a Monarch root client that speaks the wire protocol to its client.

User code, its imports, its output and Monarch's habit of ending its client stay in this process, away from the
server and from other sessions. The server starts it as ``python -m meshgate_gateway.engine --control-fd N``.

``engine.py`` connects the parts. Each part names the collaborators it needs and never imports ``engine.py``. The engine
never accepts connections, authenticates or provisions, and it never opens what users pickle.
"""
