"""The log of requests, Prometheus metrics, and the live view."""
