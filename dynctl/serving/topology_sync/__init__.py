"""`topology sync`: copies topology labels from nodes to their pods, where no operator does."""
