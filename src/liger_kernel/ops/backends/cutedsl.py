"""Loaded when LIGER_KERNEL_IMPL is "cutedsl", which stands for the native implementation: being in `sys.modules` is its whole purpose."""
