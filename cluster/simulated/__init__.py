"""Clusters on simulated time: the production scheduler on modelled machines, and provisioning."""
