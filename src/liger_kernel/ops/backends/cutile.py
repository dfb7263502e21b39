"""Loaded when LIGER_KERNEL_IMPL is "cutile", which stands for the native implementation: being in `sys.modules` is its whole purpose."""
