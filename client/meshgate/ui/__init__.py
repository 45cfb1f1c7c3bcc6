"""The page of ``meshgate ui``: a job's meshes, hosts, calls, sessions and output in a browser, live.

A server on loopback sends it what the job's gateway reports; the browser loads nothing from elsewhere and never gets
the job's token.
"""
