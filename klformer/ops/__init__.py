"""Pure tensor functions: no modules, no randomness, no configuration."""
