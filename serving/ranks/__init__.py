"""Ranks compute batches: on threads of this process, or in processes over shared memory."""
