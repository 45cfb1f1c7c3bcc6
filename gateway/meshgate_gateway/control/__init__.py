"""The control channel between the server and an engine process: its messages and its socket.

Both processes use this package. It imports neither of them and carries no user data.
"""
