"""Live code sync: scan, diff, plan, apply, each without I/O if possible.

The client scans a tree and names it by the digest of its content (``tree``), and sends the gateway a delta from a
version that the gateway has (``upload``). The gateway and every host keep a content-addressed store in which each
version becomes a snapshot directory (``store``). Relays pass the missing pieces from host to host (``relay``) over TCP
(``transport``); the engine and the hosts use them through ``distribution``. ``reload`` reloads changed modules.

Everything a host runs imports nothing but the standard library, so that it works on a pod that has torchmonarch alone;
a test checks this. ``docs/sync.md`` describes the protocol and the store.
"""
