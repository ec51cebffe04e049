"""What is read off a graph: memory, recomputation, FLOPs."""
