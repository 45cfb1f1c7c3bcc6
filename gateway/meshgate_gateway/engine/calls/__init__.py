"""Calls and channels: what the client sends to actors, and what actors send back.

This folder never creates, stops or watches a mesh.
"""
