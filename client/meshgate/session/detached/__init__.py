"""The client's side of detached sessions: what the program has read, and what a new holder finds.

Nothing here sends or waits by itself.
"""
