"""Ops whose implementation can be chosen, by `impl=` or as :mod:`liger_kernel.backends.dispatch` says. Unasked, the tensors' device
chooses. The mathematics, shapes and errors are those of the op of the same name in `liger_kernel.ops`.

All take `impl` (a name of `liger_kernel.available_impls`), `mode` (a variant, a hint that ours ignore) and `backend` (an older name of
`impl`), and raise ImplNotAvailableError for an `impl` that is not there or not for these tensors, ValueError for an unknown `mode`."""

from liger_kernel.backends import dispatch

__all__ = ["cross_entropy", "fused_add_rms_norm", "fused_linear_cross_entropy", "fused_linear_jsd", "geglu", "jsd", "kl_div", "layer_norm",
           "rms_norm", "rope", "softmax", "swiglu"]


def rms_norm(x, weight, eps=1e-6, *, offset=0.0, casting_mode="llama", in_place=False, row_mode=None, impl=None, mode=None, backend=None):
    """x rsqrt(mean(x^2) + eps) (offset + weight) over the last dimension; see :func:`liger_kernel.ops.rms_norm.rms_norm`."""
    return dispatch("rms_norm", x, weight, eps, offset, casting_mode, in_place, row_mode, impl=impl, mode=mode, backend=backend)


def layer_norm(x, weight, bias=None, eps=1e-6, *, impl=None, mode=None, backend=None):
    """LayerNorm over the last dimension; no bias is a bias of zeros; see :func:`liger_kernel.ops.layer_norm.layer_norm`."""
    return dispatch("layer_norm", x, weight, bias, eps, impl=impl, mode=mode, backend=backend)


def jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, *, impl=None, mode=None, backend=None):
    """Generalised Jensen-Shannon divergence of log-probabilities (rows, V); a scalar; see :func:`liger_kernel.ops.jsd.liger_jsd`."""
    return dispatch("jsd", _input, target, shift_labels, beta, ignore_index, impl=impl, mode=mode, backend=backend)


def softmax(x, *, impl=None, mode=None, backend=None):
    """Softmax over the last dimension; see :func:`liger_kernel.ops.softmax.liger_softmax`."""
    return dispatch("softmax", x, impl=impl, mode=mode, backend=backend)


def swiglu(a, b, gate_multiplier=1.0, down_multiplier=1.0, *, impl=None, mode=None, backend=None):
    """down_multiplier silu(gate_multiplier a) b; see :func:`liger_kernel.ops.swiglu.liger_swiglu`."""
    return dispatch("swiglu", a, b, gate_multiplier, down_multiplier, impl=impl, mode=mode, backend=backend)


def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, *, impl=None, mode=None, backend=None):
    """(q, k) rotated by position; see :func:`liger_kernel.ops.rope.liger_rope`."""
    return dispatch("rope", q, k, cos, sin, position_ids, unsqueeze_dim, impl=impl, mode=mode, backend=backend)


def cross_entropy(input, target, weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean", softcap=None,
                  return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False, *, impl=None, mode=None, backend=None):
    """(loss, z_loss, token_accuracy, predicted_tokens), the last three None unless asked for; see
    :func:`liger_kernel.ops.cross_entropy.liger_cross_entropy`."""
    return dispatch("cross_entropy", input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
                    return_z_loss, return_token_accuracy, return_predicted_tokens, impl=impl, mode=mode, backend=backend)


def fused_add_rms_norm(X, R, W, eps=1e-6, offset=0.0, casting_mode="llama", in_place=False, *, impl=None, mode=None, backend=None):
    """(normalised, X + R); see :func:`liger_kernel.ops.fused_add_rms_norm.liger_fused_add_rms_norm`."""
    return dispatch("fused_add_rms_norm", X, R, W, eps, offset, casting_mode, in_place, impl=impl, mode=mode, backend=backend)


def geglu(a, b, *, impl=None, mode=None, backend=None):
    """gelu(a) b in the tanh form; see :func:`liger_kernel.ops.geglu.liger_geglu`."""
    return dispatch("geglu", a, b, impl=impl, mode=mode, backend=backend)


def kl_div(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10, *, impl=None, mode=None, backend=None):
    """Kullback-Leibler divergence from log-probabilities; see :func:`liger_kernel.ops.kl_div.liger_kl_div`."""
    return dispatch("kl_div", y_pred, y_true, reduction, log_target, eps, impl=impl, mode=mode, backend=backend)


def fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100,
                     temperature=1.0, *, impl=None, mode=None, backend=None):
    """jsd of two heads' logits, which are never whole; see :func:`liger_kernel.ops.fused_linear_jsd.liger_fused_linear_jsd`."""
    return dispatch("fused_linear_jsd", student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta,
                    ignore_index, temperature, impl=impl, mode=mode, backend=backend)


def fused_linear_cross_entropy(_input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
                               label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
                               use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False, *, impl=None,
                               mode=None, backend=None):
    """(loss, z_loss, token_accuracy, predicted_tokens) of the head's logits, which are never whole; the last three None unless asked
    for; see :func:`liger_kernel.ops.fused_linear_cross_entropy.liger_fused_linear_cross_entropy`."""
    return dispatch("fused_linear_cross_entropy", _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale,
                    label_smoothing, reduction, softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy,
                    return_predicted_tokens, impl=impl, mode=mode, backend=backend)
