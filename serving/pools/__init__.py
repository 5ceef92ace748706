"""KV memory in slots: who holds which, under several policies behind one contract (`contract.KvPool`).

Pure, as the scheduler above it: integers in, integers out. `opening.open_pool` gives a pool by its
policy's name.
"""
