"""Real instances behind one front: on this host, on other hosts, on a Ray cluster."""
