"""Pickling of arguments and unpickling of results, between Python installations that differ.

Nothing here sends or receives: it turns values into bytes and buffers, and back.
"""
