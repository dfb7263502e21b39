"""What compilers run in place of an op's kernel: shapes and dtypes of the results."""

import functools

import torch


def register_fake(name):
    """torch.library.register_fake for the op `name`; the fake refuses a meta tensor among tensors of other devices.

    One meta argument is enough for the dispatcher to take the fake, which would then return memory on the other device that nobody
    has written: a weight that was never loaded would give numbers instead of an error.
    """
    def decorate(fake):
        @functools.wraps(fake)
        def checked(*args, **kwargs):
            devices = {t.device.type for t in args if isinstance(t, torch.Tensor)}
            if len(devices) > 1 and "meta" in devices:
                raise RuntimeError(f"{name.replace('::', '.')}: tensors lie on {' and '.join(sorted(devices))}; move them to one device "
                                   "(a meta tensor has no values: load the weights first)")
            return fake(*args, **kwargs)

        torch.library.register_fake(name)(checked)
        return fake

    return decorate
