"""Ranks compute batches: threads of this process, or processes over shared memory."""
