"""What is done to a running server, a function for each fault; benchmarks/faults.py runs them."""
