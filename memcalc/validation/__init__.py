"""Compare the ledger with real PyTorch layers. Only this package imports torch."""
