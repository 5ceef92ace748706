"""The access log and the Prometheus metrics."""
