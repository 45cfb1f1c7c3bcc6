"""Messages as frames: header and payloads encoded, cut into frames, checked, and assembled again.

Pure, and without a notion of a connection or a session: nothing here numbers, acknowledges or replays.
"""
