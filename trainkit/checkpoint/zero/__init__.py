"""One plain model of DeepSpeed's shards."""
