"""Our implementations of the ops that can be selected, found in `liger_kernel.ops` at the first call."""

import liger_kernel.ops
from liger_kernel.backends.registry import Capability, register_impl

# op -> autograd.Function of liger_kernel.ops, whose `apply` takes what the function of that name in liger_kernel.functional passes on
FUNCTIONS = {
    "cross_entropy": "LigerCrossEntropyFunction",
    "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "fused_linear_cross_entropy": "LigerFusedLinearCrossEntropyFunction",
    "fused_linear_jsd": "LigerFusedLinearJSDFunction",
    "fused_linear_kl_div": "LigerFusedLinearKLDivFunction",
    "geglu": "LigerGELUMulFunction",
    "jsd": "NativeJSDFunction",  # LigerJSDFunction itself asks which implementation
    "kl_div": "LigerKLDivLossFunction",
    "layer_norm": "LigerLayerNormFunction",
    "rms_norm": "LigerRMSNormFunction",
    "rope": "LigerRopeFunction",
    "softmax": "LigerSoftmaxFunction",
    "swiglu": "LigerSiLUMulFunction",
}


def _on_host(device):
    return device.type in ("cpu", "meta")  # meta tensors stand for shapes; any device's op knows those


def _register(op_name, function):
    """One function for both names: the ops follow their tensors' device."""

    def run(*args):
        return getattr(liger_kernel.ops, function).apply(*args)

    for name, capability in (("cuda", Capability(requires_cuda=True)), ("cpu", Capability(predicate=_on_host))):
        register_impl(op_name, impl_name=name, capability=capability, preference_rank=50, modes=("default",), default_mode="default")(run)


for _op_name, _function in FUNCTIONS.items():
    _register(_op_name, _function)
