"""Low-rank adapters on frozen linear layers, with every backward product through the rank."""
