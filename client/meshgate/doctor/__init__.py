"""``meshgate doctor``: checks this machine, the cluster and the way to a gateway, and says what to change.

The checks change nothing, except that the one of a gateway opens a session of its own for a moment.
"""
