"""The gate with its adapters, for GPUs whose copy engine moves whole tiles (Hopper)."""
