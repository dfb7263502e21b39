"""Not an op: the reference package's prebuilt kernels of this name are not part of this package."""


def is_available():
    """False: distributed work goes through torch.distributed."""
    return False
