"""Measurements on the cluster of KUBECONFIG, each a program of its own: no other benchmark needs a cluster."""
