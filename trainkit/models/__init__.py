"""Model families and how trainkit's kernels are put into them."""
