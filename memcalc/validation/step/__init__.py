"""A training step on fake CUDA tensors: every storage that it makes, and when it dies.

``FakeCuda`` lets a CPU build of PyTorch run a step on CUDA tensors without values. ``Tracker``
follows the storages. ``memcalc.analysis.allocator`` replays its log.
"""
