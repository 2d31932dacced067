"""Find by structure what a model's modules are, and prove each before a kernel takes its place."""
