"""Image steps: a chain of steps or a Dockerfile, run once on every host.

``image`` holds the chain, ``dockerfile`` parses, ``plan`` resolves steps and computes digests, ``apply`` sends them,
``on_host`` runs them. This package never builds a container image; steps run in hosts that have started.
"""
