"""A host's store: objects, snapshots, records and their garbage collection.

Nothing here knows of other hosts. Standard library only: it runs on bare workers.
"""
