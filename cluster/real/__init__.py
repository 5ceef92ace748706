"""Real instances behind one front: on this host, on other hosts, or on a Ray cluster."""
