"""What a module saves for backward, measured; stand-ins for kernels, and the memory of devices."""
