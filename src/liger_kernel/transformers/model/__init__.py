"""The patched forwards, one module a model; their losses and output classes."""
