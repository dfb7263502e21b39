"""rope against its fp64 definition and against eager PyTorch."""

import pytest
import torch
import torch._dynamo.testing

from liger_kernel.core.accuracy import CORE_ERROR, LAYOUTS, UNIT_ROUNDOFF, assert_accurate, devices, strided
from liger_kernel.ops.rope import (
    LigerRopeFunction,
    liger_rope,
    liger_rotary_pos_emb,
    liger_rotary_pos_emb_deinterleave,
    liger_rotary_pos_emb_gpt_oss,
    liger_rotary_pos_emb_interleaved,
    liger_rotary_pos_emb_interleaved_table,
    liger_rotary_pos_emb_one,
    liger_rotary_pos_emb_vision,
    rope,
    rope_backward,
    rope_forward,
)
from liger_kernel.ops.rope.cases import DTYPES, SHAPES, angles, check, inputs, run, tables
from liger_kernel.ops.rope.ref import eager, eager_complex, reference

pytestmark = pytest.mark.parametrize("device", devices())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    batch, _, _, tokens, _, r = shape
    tensors = inputs(shape, device, dtype)
    for table_dtype in {torch.float32, dtype}:
        check(*tensors, *tables(batch, tokens, r, device, table_dtype), rotary_dim=r)


@pytest.mark.parametrize("channels", ["halves", "pairs", "pairs_to_halves"])
@pytest.mark.parametrize("table", ["halves", "pairs", "shared"])
def test_orders(table, channels, device):
    """C73: where the channels of a pair lie, and the columns of the table; every vector width and its tails."""
    for shape in SHAPES:
        batch, _, _, tokens, _, r = shape
        for dtype in (torch.float32, torch.bfloat16):
            cos, sin = tables(batch, tokens, r, device, torch.float32, table)
            check(*inputs(shape, device, dtype), cos, sin, compare_eager=False, rotary_dim=r, channels=channels, table=table)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("table_dtype", DTYPES, ids=str)
def test_halves_that_differ(table_dtype, dtype, device):
    """Each half of the table's columns counts for its own channel, as in HF's formula; the backward is the exact transpose."""
    shape = (2, 3, 2, 5, 32, 32)
    torch.manual_seed(1)
    cos, sin = torch.randn(2, 5, 32, device=device).to(table_dtype), torch.randn(2, 5, 32, device=device).to(table_dtype)
    check(*inputs(shape, device, dtype), cos, sin)
    check(*inputs(shape, device, dtype), cos, sin, compare_eager=False, channels="pairs")


def test_every_sample_has_its_positions(device):
    """C69: (B, T, D), (1, T, D) and (T, D) tables."""
    shape = (3, 4, 2, 7, 32, 32)
    tensors = inputs(shape, device)
    cos, sin = tables(3, 7, 32, device)
    assert not torch.equal(cos[0], cos[1])
    each = check(*tensors, cos, sin)
    for b in range(3):
        for got, want in zip(run(rope, *(t[b : b + 1] for t in tensors), cos[b], sin[b]), each, strict=True):
            torch.testing.assert_close(got, want[b : b + 1], rtol=0, atol=0)
    for c, s in ((cos[:1], sin[:1]), (cos[0], sin[0]), (cos[:1].unsqueeze(1), sin[:1].unsqueeze(1))):
        got = run(rope, *tensors, c, s)
        for a, b in zip(got, run(rope, *tensors, cos[:1].expand(3, 7, 32), sin[:1].expand(3, 7, 32)), strict=True):
            assert torch.equal(a, b)


def test_vision(device):
    """C71: (tokens, heads, head_dim), fp32 inside, each input's own dtype out."""
    for tokens, heads, dim in ((4096, 16, 72), (1, 16, 72), (33, 3, 80), (0, 4, 80)):
        torch.manual_seed(2)
        q, k, dq, dk = (torch.randn(tokens, heads, dim, device=device).bfloat16() for _ in range(4))
        for table_dtype in (torch.float32, torch.bfloat16):
            cos, sin = (t[0] for t in tables(1, tokens, dim, device, table_dtype))
            ours = run(liger_rotary_pos_emb_vision, q, k, dq, dk, cos, sin)
            truth = run(lambda q, k, cos, sin: [t[0] for t in reference(q[None], k[None], cos, sin, unsqueeze_dim=2)],
                        *(t.double() for t in (q, k, dq, dk, cos, sin)))
            for got, want in zip(ours, truth, strict=True):
                assert_accurate(got, want, 1e-6 + UNIT_ROUNDOFF[torch.float32] * 10)
                assert got.is_contiguous()
    q, k = liger_rotary_pos_emb_vision(q.float(), k, cos, sin)
    assert q.dtype == torch.float32 and k.dtype == torch.bfloat16


def test_interleaved_models(device):
    """C73: GLM-4's tables (angles twice, as halves), GLM-4V's (each angle twice in a row), DeepSeek's regrouping; partial width."""
    shape = (2, 4, 2, 7, 64, 32)
    q, k, dq, dk = inputs(shape, device)
    half = angles(2, 7, 16, device)
    cos, sin = half.cos(), half.sin()

    def complex_model(q, k, cos, sin):
        return [torch.cat((eager_complex(t[..., :32], cos, sin), t[..., 32:]), -1) for t in (q, k)]

    want = run(complex_model, q, k, dq, dk, cos, sin)
    doubled, repeated = [torch.cat((t, t), -1) for t in (cos, sin)], [t.repeat_interleave(2, -1) for t in (cos, sin)]
    for function, table in ((liger_rotary_pos_emb_interleaved, doubled), (liger_rotary_pos_emb_interleaved_table, repeated)):
        for a, b in zip(run(function, q, k, dq, dk, *table), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def deepseek(q, k, cos, sin):
        regrouped = [t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in (q, k)]
        return eager(*regrouped, cos, sin)

    q, k, dq, dk = (t[..., :32] for t in (q, k, dq, dk))
    ours = run(liger_rotary_pos_emb_deinterleave, q, k, dq, dk, *doubled)
    for a, b in zip(ours, run(deepseek, q, k, dq, dk, *doubled), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_rotary_dim_and_table_width(device):
    """Phi-3: cos narrower than the head turns its first channels; GPT-OSS: head_dim / 2 columns turn all of it; wider tables are
    read in their first rotary_dim / 2 columns."""
    shape = (2, 4, 2, 7, 64, 64)
    q, k, dq, dk = inputs(shape, device)
    cos, sin = tables(2, 7, 32, device)
    partial = check(q, k, dq, dk, cos, sin, function=liger_rope)
    assert torch.equal(partial[0][..., 32:], q[..., 32:])
    half = tables(2, 7, 64, device, table="shared")
    want = run(eager, q, k, dq, dk, *tables(2, 7, 64, device))
    for function, options in ((liger_rotary_pos_emb_gpt_oss, {}), (liger_rotary_pos_emb, {"rotary_dim": 64})):
        for a, b in zip(run(function, q, k, dq, dk, *half, **options), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    wide = [torch.cat((t[..., :16], torch.full_like(t, float("nan"))), -1) for t in (cos, sin)]
    for a, b in zip(run(rope, q, k, dq, dk, *wide, rotary_dim=32), partial, strict=True):
        assert torch.equal(a, b)
    too_wide = tables(2, 7, 96, device)  # width > head_dim: the whole head
    for a, b in zip(rope(q, k, *too_wide), rope(q, k, *(t[..., :32] for t in too_wide), rotary_dim=64), strict=True):
        assert torch.equal(a, b)


def test_no_cost_per_length(device):
    """C75: nothing is chosen or prepared by the number of tokens: one variant takes every length (the compiler: see below)."""
    from liger_kernel import _native

    index = -1 if device == "cpu" else int(device.partition(":")[2] or 0)
    chosen = set()
    for tokens in range(1, 201):
        variants, _ = _native.explain("rope", (2, tokens, 4, 2, 64), "bf16", index)
        chosen.add(tuple((pass_name, name) for pass_name, name, mark, _ in variants if mark == "chosen"))
    assert len(chosen) == 1 and len(next(iter(chosen))) == 1


def test_calling_conventions(device):
    """C78: with and without position_ids, unsqueeze_dim by keyword, in sixth place, and in fifth, where newer hosts pass it."""
    q, k, _, _ = inputs((2, 4, 2, 7, 32, 32), device)
    cos, sin = tables(2, 7, 32, device)
    want = rope(q, k, cos, sin)
    positions = torch.arange(7, device=device)[None]
    calls = [liger_rotary_pos_emb(q, k, cos, sin), liger_rotary_pos_emb(q, k, cos, sin, positions),
             liger_rope(q, k, cos, sin, positions, 1),
             liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1), liger_rotary_pos_emb(q, k, cos, sin, 1),
             LigerRopeFunction.apply(q, k, cos, sin), LigerRopeFunction.apply(q, k, cos, sin, positions, 1, None),
             liger_rotary_pos_emb(q, k, cos.unsqueeze(1), sin.unsqueeze(1))]
    qt, kt = q.transpose(1, 2), k.transpose(1, 2)
    calls += [[t.transpose(1, 2) for t in pair] for pair in (
        liger_rotary_pos_emb(qt, kt, cos, sin, unsqueeze_dim=2), liger_rotary_pos_emb(qt, kt, cos, sin, None, 2),
        liger_rotary_pos_emb(qt, kt, cos, sin, 2), liger_rotary_pos_emb(qt, kt, cos, sin, unsqueeze_dim=-2),
        liger_rotary_pos_emb(qt, kt, cos.unsqueeze(2), sin.unsqueeze(2), unsqueeze_dim=2),
        liger_rotary_pos_emb(qt, kt, cos.unsqueeze(1), sin.unsqueeze(1), unsqueeze_dim=2))]
    calls.append((liger_rotary_pos_emb_one(q, cos, sin), liger_rotary_pos_emb_one(kt, cos, sin, unsqueeze_dim=2).transpose(1, 2)))
    for call in calls:
        for got, expected in zip(call, want, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("grad_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, grad_layout, device):
    """Strided and misaligned inputs and upstream gradients; results and gradients in the inputs' order of tokens and heads."""
    for dtype, dim in ((torch.bfloat16, 64), (torch.float32, 36)):
        q, k, dq, dk = (t.contiguous() for t in inputs((2, 3, 2, 5, dim, dim), device, dtype))
        cos, sin = tables(2, 5, dim, device)
        want = run(rope, q, k, dq, dk, cos, sin)
        got = run(rope, strided(q, layout), strided(k, layout), strided(dq, grad_layout), strided(dk, grad_layout),
                  strided(cos, layout), strided(sin, layout))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_native_memory(device):
    """Nothing is copied: outputs and gradients have the token-major memory of the projections, whatever dq's is, and are no views."""
    q, k, dq, dk = inputs((2, 3, 2, 5, 32, 32), device)
    cos, sin = tables(2, 5, 32, device)
    for unsqueeze_dim in (1, 2):
        tensors = [q, k, dq.contiguous(), dk] if unsqueeze_dim == 1 else [t.transpose(1, 2) for t in (q, k, dq.contiguous(), dk)]
        # gradients of leaves are copied into the leaf's layout by autograd, so ask for them directly
        a, b = (t.detach().requires_grad_() for t in tensors[:2])
        out = rope(a, b, cos, sin, unsqueeze_dim=unsqueeze_dim)
        grads = torch.autograd.grad(out, (a, b), tensors[2:])
        for got, like in zip((*out, *grads), (q, k, q, k), strict=True):
            assert got.stride() == (like if unsqueeze_dim == 1 else like.transpose(1, 2)).stride()
        out[0].mul_(2)  # callers may scale in place
    c, d = q.contiguous(), k.contiguous()
    assert all(t.is_contiguous() for t in rope(c, d, cos, sin))


def test_inputs_keep_their_values(device):
    tensors = inputs((2, 4, 2, 7, 32, 32), device)
    cos, sin = tables(2, 7, 32, device)
    before = [t.clone() for t in (*tensors, cos, sin)]
    run(rope, *tensors, cos, sin)
    rope_backward(*rope_forward(*tensors[:2], cos, sin))
    for t, old in zip((*tensors, cos, sin), before, strict=True):
        assert torch.equal(t, old)


def test_forward_backward_functions(device):
    q, k, dq, dk = inputs((2, 4, 2, 7, 32, 16), device)
    cos, sin = tables(2, 7, 16, device)
    want = run(rope, q, k, dq, dk, cos, sin)
    out = rope_forward(q, k, cos, sin)
    assert out[2] is cos and out[3] is sin
    for got, expected in zip((*out[:2], *rope_backward(dq, dk, cos, sin)), want, strict=True):
        assert torch.equal(got, expected)
    for got, expected in zip(rope_backward(*out), (q, k), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_empty(device):
    for shape in ((0, 2, 1, 4, 8, 8), (2, 2, 1, 0, 8, 8), (2, 0, 0, 3, 8, 8), (2, 2, 0, 3, 8, 8)):
        tensors = inputs(shape, device)
        out = run(rope, *tensors, *tables(shape[0], shape[3], 8, device))
        assert [t.shape for t in out] == [t.shape for t in tensors]


def test_gradients_only_where_wanted_and_twice(device):
    """C87: a second backward with another upstream; a frozen q or k; an output that nobody uses."""
    q, k, dq, dk = inputs((2, 4, 2, 7, 32, 32), device)
    cos, sin = tables(2, 7, 32, device)
    want = run(rope, q, k, dq, dk, cos, sin)[2:]
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    out = rope(q, k, cos, sin)
    torch.autograd.backward(out, (dq, dk), retain_graph=True)
    torch.autograd.backward(out, (3 * dq, 3 * dk))
    torch.testing.assert_close(q.grad, 4 * want[0])
    torch.testing.assert_close(k.grad, 4 * want[1])
    for wanted in (0, 1):
        pair = [q.detach().clone(), k.detach().clone()]
        pair[wanted].requires_grad_()
        rope(*pair, cos, sin)[wanted].backward((dq, dk)[wanted])
        assert torch.equal(pair[wanted].grad, want[wanted])
    x = q.detach().requires_grad_()
    liger_rotary_pos_emb_one(x, cos, sin).backward(dq)
    assert torch.equal(x.grad, want[0])


def test_dtypes_of_q_and_k_differ(device):
    q, k, dq, dk = inputs((2, 4, 2, 7, 32, 32), device)
    cos, sin = tables(2, 7, 32, device, torch.bfloat16)
    ours = check(q, k.bfloat16(), dq, dk.bfloat16(), cos, sin, compare_eager=False)
    assert [t.dtype for t in ours] == [torch.float32, torch.bfloat16] * 2
    q[0, 0, 0, 3], k[1, 1, 6, 31] = float("nan"), float("inf")
    out, plain = rope(q, k, cos, sin), eager(q, k, cos, sin)
    for a, b in zip(out, plain, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())


def test_errors(device):
    q, k, _, _ = inputs((2, 4, 2, 7, 32, 32), device)
    cos, sin = tables(2, 7, 32, device)
    for bad in (0, -2, 7, 34):
        with pytest.raises(ValueError, match="rotary_dim is"):
            rope(q, k, cos, sin, rotary_dim=bad)
    with pytest.raises(ValueError, match="cos has 14 columns, rotary_dim 32 takes 16"):
        rope(q, k, cos[..., :14], sin[..., :14], rotary_dim=32)
    with pytest.raises(ValueError, match="unsqueeze_dim is 3"):
        rope(q, k, cos, sin, unsqueeze_dim=3)
    with pytest.raises(ValueError, match="expected 4 dimensions"):
        rope(q[0], k[0], cos, sin)
    with pytest.raises(ValueError, match="may differ in dimension 1"):
        rope(q, k[:, :, :6], cos, sin)
    with pytest.raises(ValueError, match="cos has the shape"):
        rope(q, k, cos[:, :6], sin[:, :6])
    with pytest.raises(ValueError, match="sin has 16"):
        rope(q, k, cos, sin[..., :16])
    with pytest.raises(ValueError, match="channels is 'odd'"):
        rope(q, k, cos, sin, channels="odd")
    with pytest.raises(ValueError, match="table is 'odd'"):
        rope(q, k, cos, sin, table="odd")
    with pytest.raises(CORE_ERROR, match="fp32, bf16 and fp16"):
        rope(q.double(), k.double(), cos, sin)
    with pytest.raises(CORE_ERROR, match="sin is bf16, cos is fp32"):
        rope(q, k, cos, sin.bfloat16())


def test_opcheck_and_compile(device):
    """C76: fullgraph over the rotation and a later use of the unrotated q; lengths do not recompile (C75)."""
    q, k, dq, dk = inputs((2, 4, 2, 7, 32, 16), device)
    cos, sin = tables(2, 7, 16, device)
    for heads_dim, a, b in ((1, q, k), (2, q.transpose(1, 2), k.transpose(1, 2)), (1, q.contiguous(), k.contiguous())):
        outer = a.stride(3 - heads_dim) >= a.stride(heads_dim)
        torch.library.opcheck(torch.ops.liger_kernel.rope, (a, b, cos, sin, heads_dim, 16, 0, 0, 0, False, outer, outer),
                              test_utils=("test_schema", "test_faketensor"))

    def model(q, k, cos, sin):
        a, b = liger_rotary_pos_emb(q, k, cos, sin)
        return a * 2 + q, b - k

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for tokens in (3, 5, 6, 9, 17):
        tensors = inputs((2, 4, 2, tokens, 32, 32), device)
        cos, sin = tables(2, tokens, 32, device)
        for got, want in zip(run(compiled, *tensors, cos, sin), run(model, *tensors, cos, sin), strict=True):
            torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2
    inductor = torch.compile(model, fullgraph=True)
    for unsqueezed in (1, 2):
        q, k, dq, dk = inputs((2, 4, 2, 8, 32, 32), device)
        cos, sin = tables(2, 8, 32, device)
        if unsqueezed == 2:  # views of one projection
            qkv = torch.randn(2, 8, 8 * 32, device=device)
            q, k = qkv[..., :128].unflatten(-1, (4, 32)).transpose(1, 2), qkv[..., 128:192].unflatten(-1, (2, 32)).transpose(1, 2)
        for got, want in zip(run(inductor, q, k, dq, dk, cos, sin), run(model, q, k, dq, dk, cos, sin), strict=True):
            torch.testing.assert_close(got, want)
