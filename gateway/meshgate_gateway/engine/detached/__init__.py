"""What a detached session keeps for its next holder, and who holds it.

Nothing here knows Monarch or the connection: messages come in as the engine sends and receives them.
"""
