"""KubernetesJob: worker pods in a cluster, and the ways to reach their gateway.

``compute`` and ``requests`` validate arguments, ``cluster`` and ``remote_gateway`` start and end jobs, ``tokens`` finds
the driver's token, ``dialer`` and ``port_forward`` connect to gateways, ``display`` shows progress. This package never
calls the Kubernetes API itself; ``meshgate_kubernetes`` does.
"""
