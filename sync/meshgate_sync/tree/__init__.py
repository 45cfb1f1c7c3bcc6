"""A tree of files as data: scan, ignore rules, chunks, digests, deltas.

Nothing here sends anything or writes below a store.
"""
