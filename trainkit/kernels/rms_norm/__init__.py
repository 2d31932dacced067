"""RMSNorm and add + RMSNorm."""
