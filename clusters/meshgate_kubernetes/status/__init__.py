"""The state of a job's pods: which are hosts, why others are not ready, and how they ended. Creates no objects.

``diagnosis`` explains pods that do not start, ``termination`` pods that are lost; ``discovery`` finds hosts.
"""
