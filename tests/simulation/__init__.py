"""The client, the wire, the gateway's server and its engines in one process, on a virtual clock.

The code is the real one, on real sockets of this machine. Only what lies below is replaced: the clock and the order in
which processes run (``processes``), the network (``network``), the supervisor (``supervisor``) and Monarch
(``monarch``). Nothing here waits, and a seed decides everything: ``python -m tests.simulation --seed N`` replays it.
"""
