"""`--invariant`: gradients of leaves in a fixed order, and a sampler of their programs; the same bits on every mesh."""
