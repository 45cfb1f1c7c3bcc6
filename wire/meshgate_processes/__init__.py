"""Processes of this machine that others started: which one a pid means, which ones belong to a job or a host,
and how one ended.

Used by the client, the gateway and the hosts. It needs nothing but the standard library, and never signals a process
that has only the same pid.
"""
