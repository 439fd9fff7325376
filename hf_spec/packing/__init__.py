"""Weights of linear layers in the layout of oneDNN's products, so that a forward on a CPU does not reorder them."""
