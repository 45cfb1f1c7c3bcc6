"""The specification of a job, and its Kubernetes objects. Data in, manifests out: never calls an API server."""
