"""The supervisor: the gateway's first process, which starts its server again if that dies.

Whatever must outlive a server is held here: listening sockets, engines, host processes and what the server knew about
them. It needs only the standard library and ``meshgate_processes``, and never runs user code.
"""
