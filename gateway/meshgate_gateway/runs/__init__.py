"""Runs: submitted programs beside the gateway, which outlive the laptop and the gateway's server.

The server keeps directories and answers requests; each run has a runner, a process of its own under the supervisor,
which starts the program, keeps its output, holds its limits and notes how it ended. Nothing here runs user code in the
server, and whatever a program does ends its run at most.
"""
