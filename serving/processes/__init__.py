"""Sockets, shared memory, secrets, restarts and logs of the processes of one server."""
