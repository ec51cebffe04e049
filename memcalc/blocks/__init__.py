"""The parts of a model, each written once, as the forward pass that it is."""
