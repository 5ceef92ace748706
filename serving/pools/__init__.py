"""KV memory in slots: pools that give blocks of slots to requests, under several policies behind one contract
(`contract.KvPool`). Pure: integers in, integers out. `opening.open_pool` makes a pool by its policy's name.
"""
