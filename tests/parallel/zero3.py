"""What a model sees of DeepSpeed's ZeRO stage 3, without DeepSpeed.

A parameter has ds_id, ds_shape and ds_status. Its data is empty, of shape (0,), but between the hooks of the module that owns it
(forward, and backward of the module's results) and inside `deepspeed.zero.GatheredParameters`. Reading it as an attribute while
another module's forward runs gathers it until that ends, and again for backward. Its gradient is taken when autograd accumulates
it, must have the full shape, and is reduced over the ranks.
"""

import contextlib
import enum
import sys
import types

import torch
from ranks import WORLD


class Status(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2


def gather(parameter):
    if parameter.ds_status is Status.NOT_AVAILABLE:
        pieces = [torch.empty_like(parameter.ds_tensor) for _ in range(WORLD)]
        torch.distributed.all_gather(pieces, parameter.ds_tensor)
        parameter.data = torch.cat(pieces)[: parameter.ds_numel].view(parameter.ds_shape)
        parameter.ds_status = Status.AVAILABLE


def release(parameter):
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    parameter.ds_status = Status.NOT_AVAILABLE


@contextlib.contextmanager
def gathered_parameters(parameters):
    ours = [p for p in parameters if hasattr(p, "ds_id") and p.ds_status is Status.NOT_AVAILABLE]
    for parameter in ours:
        gather(parameter)
    yield
    for parameter in ours:
        release(parameter)


@contextlib.contextmanager
def installed():
    """`import deepspeed` finds the little of it that is here."""
    module = types.ModuleType("deepspeed")
    module.zero = types.SimpleNamespace(GatheredParameters=gathered_parameters)
    before = sys.modules.get("deepspeed")
    sys.modules["deepspeed"] = module
    try:
        yield
    finally:
        del sys.modules["deepspeed"]
        if before is not None:
            sys.modules["deepspeed"] = before


def _each(action, parameters):
    def hook(*_):
        for parameter in parameters:
            action(parameter)

    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"  # as the real one's
    return hook


class Parameters(dict):
    """`_parameters` of a module: gathers what is read while some forward runs, and tells `external`."""

    def __init__(self, parameters, wrapper):
        super().__init__(parameters)
        self.wrapper = wrapper

    def __getitem__(self, name):
        parameter = super().__getitem__(name)
        if parameter is not None and self.wrapper.running and parameter.ds_status is Status.NOT_AVAILABLE:
            gather(parameter)
            self.wrapper.external.append(parameter)
        return parameter


class Zero3(torch.nn.Module):
    """`model`, partitioned. `step` updates with SGD without momentum; `whole(name)` is a parameter's full value."""

    def __init__(self, model):
        super().__init__()
        self.model, self.accumulators, self.external, self.running = model, [], [], False
        for index, parameter in enumerate(model.parameters()):
            self._partition(index, parameter)
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own:
                frozen = [p for p in own if not p.requires_grad]  # the others are released when their gradient is there
                module.register_forward_pre_hook(_each(gather, own))
                module.register_forward_hook(_each(release, own))
                module.register_full_backward_pre_hook(_each(gather, own))
                if frozen:
                    module.register_full_backward_hook(_each(release, frozen))
                module._parameters = Parameters(module._parameters, self)

    def _partition(self, index, parameter):
        parameter.ds_id, parameter.ds_shape, parameter.ds_numel = index, parameter.shape, parameter.numel()
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0] if parameter.requires_grad else None
        pieces = torch.nn.functional.pad(parameter.data.flatten(), (0, -parameter.numel() % WORLD)).chunk(WORLD)
        parameter.ds_tensor, parameter.ds_grad = pieces[torch.distributed.get_rank()].clone(), None
        release(parameter)

        def reduce(*_):
            assert parameter.grad.shape == parameter.ds_shape, "the gradient is that of a part"
            torch.distributed.all_reduce(parameter.grad)
            parameter.ds_grad, parameter.grad = parameter.grad / WORLD, None
            release(parameter)

        if accumulator is not None:
            accumulator.register_hook(reduce)
            self.accumulators.append(accumulator)

    def forward(self, *args, **kwargs):
        self.running = True
        out = self.model(*args, **kwargs)
        self.running, external, self.external = False, self.external, []
        _each(release, external)()
        out.loss.register_hook(_each(gather, external))
        return out

    def step(self, lr=0.05):
        for parameter in self.model.parameters():
            release(parameter)
            if parameter.ds_grad is not None:
                pieces = torch.nn.functional.pad(parameter.ds_grad.flatten(), (0, -parameter.ds_numel % WORLD)).chunk(WORLD)
                parameter.ds_tensor -= lr * pieces[torch.distributed.get_rank()]

    def whole(self, parameter):
        with gathered_parameters([parameter]):
            return parameter.data.clone()
