"""torch's FSDP2: the engine, and weights read straight into the parts that ranks hold."""
