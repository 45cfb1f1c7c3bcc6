"""Models that messages are made of. Import the messages from ``meshgate_wire.messages`` only."""
