"""Pushes the driver's code to every host: project discovery, file watching, sync, warnings about missing modules.

``project`` finds the tree, ``watcher`` reports saves, ``push`` scans and sends, ``session_sync`` serves ``job.sync()``.
This package never runs code on workers and never decides where a version is stored; ``meshgate_sync`` does.
"""
