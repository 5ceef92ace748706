"""What is done to a server for minutes or hours, and to its parsers: `make test-soak` runs it all."""
