"""Gateways as processes of this machine: their start and end, identity and files. Never knows a kind of job."""
