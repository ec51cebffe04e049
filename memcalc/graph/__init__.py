"""The graph that a block's forward pass records: tensors, operations, and what backward keeps."""
