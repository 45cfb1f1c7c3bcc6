"""The server's sessions: the table that decides, the manager that acts on its decisions, and the engine processes.

Nothing here reads a message of a session: its socket is handed to its engine.
"""
