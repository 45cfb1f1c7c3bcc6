"""A way into each host of a job: commands, terminals, forwarded ports and stacks, through the session's websocket.

What runs on a host is an actor in a process of its own there, so it survives cuts of the connection as every call does,
and ends with the session. Nothing here listens on anything but loopback.
"""

OWN_MESHES = frozenset(
    {"admin", "debug", "doctor", "exec", "forward", "gather", "image", "mount", "pull", "shell", "stacks", "top"}
)
"""Names of the proc meshes that meshgate itself spawns for a moment."""
