"""Embeddings served from every device of a host: WindVE's queues (Huang et al. 2025).

`queues` decides which device an input goes to and how many may wait; `depth` finds from a few measurements
how many that are; `devices` knows what there is. These are pure, or read files alone. `worker_process` runs
one device's worker, `client` puts requests through all of them, `simulated` runs the same queues on
simulated time.
"""
