"""Requests over several machines: routing, simulation by the production scheduler, provisioning.

"Splitwise" in the comments of this room is "Splitwise: Efficient Generative LLM Inference Using Phase
Splitting" (Patel et al., ISCA 2024).
"""
