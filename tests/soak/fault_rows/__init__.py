"""What is done to a running server, a function for each fault; tests/soak/faults.py runs them."""
