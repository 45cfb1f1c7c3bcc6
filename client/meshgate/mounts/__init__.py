"""Shows directories elsewhere: the laptop's on the hosts (``remote``), the hosts' on the laptop (``gather``).

Both copy, and need neither privileges nor FUSE. Code that processes run from is never sent by this package.
"""
