"""Running code inside an FSDP 1 unit, where its parameters are whole."""


class _FSDPForwardRedirection:
    """`_FSDPForwardRedirection()(wrapper, method, *args, **kwargs)` is `method(*args, **kwargs)`, called from within the wrapper's
    forward: FSDP gathers the wrapped module's parameters before it and frees them after it, and hooks their gradients."""

    def __call__(self, wrapper_module, method, *args, **kwargs):
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert isinstance(wrapper_module, FullyShardedDataParallel), (
            f"_FSDPForwardRedirection: {type(wrapper_module).__name__} is not a FullyShardedDataParallel"
        )
        wrapped = wrapper_module._fsdp_wrapped_module
        original = wrapped.forward

        def once(*args, **kwargs):
            wrapped.forward = original
            return method(*args, **kwargs)

        wrapped.forward = once
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            wrapped.forward = original
