"""A way into each host of a job: commands, terminals, forwarded ports and stacks, through the session's websocket.

What runs on a host is an actor in a process of its own there, so it survives cuts of the connection as every call does,
and ends with the session. Nothing here listens on anything but loopback.
"""

_USES = "admin debug devices doctor exec forward gather image mount pull shell stacks top"
OWN_MESHES = frozenset(f"meshgate_{use}" for use in _USES.split())
"""Names of the proc meshes that meshgate itself spawns, and of their actors. Views leave them out, so each has a name
that no program uses for a mesh of its own."""
