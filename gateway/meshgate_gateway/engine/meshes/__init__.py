"""The life of a session's meshes: attached or spawned, supervised, stopped, released.

This folder never sends calls to users' actors and knows nothing about how code reaches the hosts.
"""
