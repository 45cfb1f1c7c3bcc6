"""The state machine of a node in the distribution tree: events in, commands out.

``relay`` is the entry, ``plan`` computes the trees and has the fan-out, ``versions`` and ``upstream`` decide what to
request, ``downstream`` what to send.

Never does I/O and never reads a clock. Standard library only: it runs on bare workers.
"""
