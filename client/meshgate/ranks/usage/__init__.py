"""What the processes of a job use on their hosts: CPU, memory and GPUs, read by an actor on each host.

The actor needs nothing but torchmonarch.
"""
