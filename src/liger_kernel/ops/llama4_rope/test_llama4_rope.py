"""llama4_rope against its fp64 definition, against eager PyTorch and against transformers' own functions."""

import types

import pytest
import torch

from liger_kernel.core.accuracy import CORE_ERROR, devices
from liger_kernel.ops.llama4_rope import (
    LigerLlama4RopeFunction,
    apply_liger_llama4_rope_full,
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
)
from liger_kernel.ops.llama4_rope.cases import DTYPES, SHAPES, check, frequencies, inputs, run

pytestmark = pytest.mark.parametrize("device", devices())
SHAPE = (2, 7, 4, 2, 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    check(*inputs(shape, device, dtype), frequencies(shape[0], shape[1], shape[4] // 2, device))


def test_every_cpu_variant(monkeypatch, device):
    """The variants of this machine; LIGER_ROPE forces them."""
    if device != "cpu":
        pytest.skip("the CPU's variants")
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_ROPE", variant)
        try:
            for shape in SHAPES:
                check(*inputs(shape, device, torch.bfloat16), frequencies(shape[0], shape[1], shape[4] // 2))
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)


def test_every_cuda_variant(monkeypatch, device):
    if device == "cpu":
        pytest.skip("the GPU's variants")
    for shape in SHAPES:
        for dtype in DTYPES:
            arguments = *inputs(shape, device, dtype), frequencies(shape[0], shape[1], shape[4] // 2, device)
            for variant in ("cuda_scalars", "cuda_half_vectors", "cuda_vectors"):
                monkeypatch.setenv("LIGER_ROPE", variant)
                try:
                    result = run(liger_llama4_text_rotary_pos_emb, *arguments)
                except CORE_ERROR as e:
                    assert "cannot run" in str(e)
                    continue
                if variant == "cuda_scalars":
                    want = check(*arguments)
                assert all(torch.equal(a, b) for a, b in zip(result, want, strict=True))


def test_forms_of_the_table(device):
    """C69: rows per sample; more rows than tokens; the real view; other precisions, strides and conjugates. Not unit-sized numbers."""
    tensors = inputs(SHAPE, device)
    freqs = frequencies(2, 9, 16, device) * 1.25
    assert not torch.equal(freqs[0, 0], freqs[1, 0])
    want = check(*tensors, freqs[:, :7])
    spaced = torch.empty(2, 9, 32, dtype=torch.complex64, device=device)[..., ::2].copy_(freqs)
    double = freqs.to(torch.complex128)
    for form in (freqs, torch.view_as_real(freqs), spaced, freqs.mT.contiguous().mT, double, freqs.conj().resolve_conj().conj()):
        got = run(LigerLlama4RopeFunction.apply, *tensors, form)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    one = check(*tensors, freqs[:1, :7])
    for form in (freqs[:1], freqs[0], torch.view_as_real(freqs[0]), freqs[:1].expand(2, 9, 16)):
        got = run(LigerLlama4RopeFunction.apply, *tensors, form)
        assert all(torch.equal(a, b) for a, b in zip(got, one, strict=True))
    assert torch.equal(LigerLlama4RopeFunction.apply(*tensors[:2], freqs, 256)[0], want[0])


def test_complex_table_is_not_copied(device):
    """complex64 is read where it lies: what autograd keeps shares its memory."""
    q, k, _, _ = inputs(SHAPE, device)
    freqs = frequencies(2, 9, 16, device)
    out = liger_llama4_text_rotary_pos_emb(q.requires_grad_(), k, freqs)[0]
    kept = out.grad_fn.saved_tensors
    assert all(t.untyped_storage().data_ptr() == freqs.untyped_storage().data_ptr() for t in kept)


def test_against_transformers(device):
    """Text and vision functions of the model, with tables of its own modules; gradients too."""
    modeling = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig

    for dtype in DTYPES:
        tensors = inputs((2, 17, 5, 1, 64), device, dtype)
        freqs = frequencies(2, 17, 32, device)
        tolerance = dict(rtol=1e-6, atol=1e-6) if dtype == torch.float32 else dict(rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        pairs = [(liger_llama4_text_rotary_pos_emb, modeling.apply_rotary_emb, freqs)]
        vision = modeling.Llama4VisionRotaryEmbedding(
            Llama4VisionConfig(hidden_size=64, num_attention_heads=1, image_size=16, patch_size=4)).freqs_ci.to(device)
        assert vision.shape == (17, 1, 32)
        pairs.append((liger_llama4_vision_rotary_pos_emb, modeling.vision_apply_rotary_emb, vision))
        for cast in (torch.float32, torch.bfloat16):  # model.to(dtype) leaves the real parts
            pairs.append((liger_llama4_vision_rotary_pos_emb, modeling.vision_apply_rotary_emb, vision.real.to(cast)))
        for ours, theirs, table in pairs:
            for got, want in zip(run(ours, *tensors, table), run(theirs, *tensors, table), strict=True):
                torch.testing.assert_close(got, want, **tolerance)


def test_forms_of_the_vision_table(device):
    q, k, dq, dk = inputs(SHAPE, device)
    freqs = frequencies(2, 7, 16, device)
    want, one = check(q, k, dq, dk, freqs), check(q, k, dq, dk, freqs[:1])
    for form, expected in ((freqs, want), (freqs.unsqueeze(2), want), (freqs[0], one), (freqs[:1], one), (freqs[0].unsqueeze(1), one),
                           (freqs[:1].unsqueeze(2), one)):
        got = run(liger_llama4_vision_rotary_pos_emb, q, k, dq, dk, form)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    for wrong in (freqs[0, 0], freqs[None, :, :, None]):
        with pytest.raises(ValueError, match="freqs_ci has [15] dimensions, expected 2, 3 or 4"):
            liger_llama4_vision_rotary_pos_emb(q, k, wrong)
    with pytest.raises(ValueError, match="freqs_cis has the shape"):
        liger_llama4_vision_rotary_pos_emb(q, k, freqs.unsqueeze(1))


def test_strides(device):
    """Heads-major memory, slices of one projection, misaligned bases and upstream gradients."""
    q, k, dq, dk = inputs(SHAPE, device)
    freqs = frequencies(2, 7, 16, device)
    want = run(liger_llama4_text_rotary_pos_emb, q, k, dq, dk, freqs)
    packed = torch.cat([q.flatten(2), k.flatten(2)], -1)
    views = packed[..., :128].unflatten(-1, (4, 32)), packed[..., 128:].unflatten(-1, (2, 32))
    heads_major = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, dq, dk)]
    shifted = [torch.empty(t.numel() + 1, device=device)[1:].view(t.shape).copy_(t) for t in (q, k, dq, dk)]
    for tensors in ((*views, dq, dk), heads_major, shifted, (q, k, *heads_major[2:])):
        for got, expected in zip(run(liger_llama4_text_rotary_pos_emb, *tensors, freqs), want, strict=True):
            assert torch.equal(got, expected)


def test_dtypes_frozen_inputs_and_second_backward(device):
    q, k, dq, dk = inputs(SHAPE, device, torch.bfloat16)
    freqs = frequencies(2, 7, 16, device)
    want = run(liger_llama4_text_rotary_pos_emb, q, k, dq, dk, freqs)
    wide = k.float().requires_grad_()
    out = liger_llama4_text_rotary_pos_emb(q, wide, freqs)
    assert out[1].dtype == torch.bfloat16 and torch.equal(out[1], want[1])
    out[1].backward(dk, retain_graph=True)
    assert wide.grad.dtype == torch.float32 and torch.equal(wide.grad, want[3].float())
    out[1].backward(2 * dk)
    assert torch.equal(wide.grad, 3 * want[3].float())
    x = q.detach().requires_grad_()
    liger_llama4_text_rotary_pos_emb(x, k, freqs)[0].backward(dq)
    assert torch.equal(x.grad, want[2]) and k.grad is None


def test_empty(device):
    for shape in ((0, 3, 2, 1, 8), (2, 0, 2, 1, 8), (2, 3, 0, 0, 8)):
        tensors = inputs(shape, device)
        out = run(liger_llama4_text_rotary_pos_emb, *tensors, frequencies(1, shape[1], 4, device))
        assert [t.shape for t in out] == [t.shape for t in tensors]


def test_errors(device):
    q, k, _, _ = inputs(SHAPE, device)
    freqs = frequencies(2, 7, 16, device)
    for wrong in (freqs[:, :6], freqs[..., :15], freqs[0, 0], frequencies(3, 7, 16, device), freqs.real, freqs.unsqueeze(0)):
        with pytest.raises(ValueError, match="freqs_cis has the shape"):
            liger_llama4_text_rotary_pos_emb(q, k, wrong)
    with pytest.raises(ValueError, match="q has the shape"):
        liger_llama4_text_rotary_pos_emb(q[0], k[0], freqs)
    with pytest.raises(ValueError, match="may differ in dimension 2"):
        liger_llama4_text_rotary_pos_emb(q, k[:, :6], freqs)


def test_compile(device):
    """C76: fullgraph over the rotation and a later use of the unrotated q, with complex numbers and their real view."""
    tensors = inputs(SHAPE, device)
    freqs = frequencies(2, 7, 16, device)

    def model(q, k, freqs):
        a, b = liger_llama4_text_rotary_pos_emb(q, k, freqs)
        return a * 2 + q, b - k

    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    for table in (freqs, torch.view_as_real(freqs)):
        for got, want in zip(run(compiled, *tensors, table), run(model, *tensors, table), strict=True):
            torch.testing.assert_close(got, want)


def test_apply_to_a_module(device):
    module = types.SimpleNamespace()
    apply_liger_llama4_rope_full(module)
    assert module.apply_rotary_emb is liger_llama4_text_rotary_pos_emb
    assert module.vision_apply_rotary_emb is liger_llama4_vision_rotary_pos_emb
