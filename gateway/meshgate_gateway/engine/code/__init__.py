"""The code of a session: versions from the client, sync agents on its hosts, reloads of running processes.

This folder waits for versions and starts what distributes them; ``meshgate_sync`` does the distribution. It never
spawns users' processes or actors.
"""
