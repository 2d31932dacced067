"""Low-rank adapters on frozen linear layers, with every backward product through the rank.

These functions are not in the registry of ops: they take layers, not tensors. The promises of the
registry are tested on them all the same, in tests/lora/test_lora_contract.py.
"""
