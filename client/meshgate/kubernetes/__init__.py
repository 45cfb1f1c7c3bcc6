"""The laptop's side of a job in a cluster: the way to its gateway, and what a terminal shows while it comes up."""
