"""A load generator against any server of the OpenAI API: it sends requests and measures what clients see.

`session.run_load_test` is the whole of it. Nothing here prints, and nothing here needs a model or a kernel.
"""
