"""Code follows live: scan, diff, plan, apply, each pure where it can be.

The laptop scans a tree (``scan``), names it by the digest of its content (``tree``) and tells the gateway how it
differs from a version that the gateway holds (``delta``). The gateway and every host keep a content-addressed
store (``store``) in which each version becomes a snapshot directory; relays (``relay``) hand the missing pieces
from host to host along the routes that ``plan`` lays out.

Everything a host runs (``agent``, ``serve``, ``home``, and what they import) imports nothing but the standard library,
so that it works on a pod which holds torchmonarch alone; a test holds them to it. ``docs/sync.md`` describes the
protocol and the store.
"""
