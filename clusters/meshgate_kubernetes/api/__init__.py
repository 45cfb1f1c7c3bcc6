"""The Kubernetes API client, and the errors it raises. Knows nothing about jobs."""
