"""Embeddings served from every device of a host: WindVE's queues (Huang et al. 2025).

`queues` decides which device takes an input and how many inputs may wait; `depth` finds that number from a
few measurements; `devices` lists the host's devices. `worker_process` runs one device's worker; `client`
sends requests through the workers of all devices."""
