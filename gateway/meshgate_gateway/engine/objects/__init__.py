"""What messages refer to by number: host, proc and actor meshes, and channels.

Records, the table of them, and how a reference becomes Monarch's own object. This folder never creates, stops or
watches a mesh and never sends a message.
"""
