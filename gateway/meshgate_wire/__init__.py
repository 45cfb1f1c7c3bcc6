"""meshgate."""
