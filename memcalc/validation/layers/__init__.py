"""The layers that are built and measured, and recurrent networks."""
