"""Validation: what real PyTorch layers keep, against the ledger. The only home of torch."""
