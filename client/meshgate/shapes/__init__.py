"""Shapes of meshes: extents, points, slices, regions, and values by point.

Pure data with the behavior of Monarch's classes. Nothing here knows of a session or does I/O.
"""
