"""The feed-forward block of a mixture of experts: routing, grouped products, adapters on each."""
