"""Interface level that consumers gate on, plus this implementation's own number."""

__version__ = "0.8.5+native.1"
