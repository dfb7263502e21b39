"""The variants of rope: each against the definition, the CUDA ones against each other, and sizes beyond 32-bit offsets."""

import pytest
import torch

from liger_kernel.core.accuracy import CORE_ERROR, assert_accurate, devices
from liger_kernel.ops.rope import liger_rotary_pos_emb_one, rope
from liger_kernel.ops.rope.cases import DTYPES, SHAPES, check, inputs, run, tables
from liger_kernel.ops.rope.ref import reference_one

pytestmark = pytest.mark.parametrize("device", devices())


def test_every_cpu_variant(monkeypatch, device):
    """The variants of this machine agree; an unknown name is an error that lists them."""
    if device != "cpu":
        pytest.skip("the CPU's variants")
    for variant in ("cpu", "cpu_avx2", "cpu_avx512"):
        monkeypatch.setenv("LIGER_ROPE", variant)
        try:
            for shape in SHAPES[1:10:2]:  # test.cpp takes every width
                for channels in ("halves", "pairs", "pairs_to_halves"):
                    for dtype in DTYPES:
                        cos, sin = tables(shape[0], shape[3], shape[5], dtype=dtype)
                        check(*inputs(shape, device, dtype), cos, sin, compare_eager=False, rotary_dim=shape[5], channels=channels)
        except CORE_ERROR as e:
            assert "cannot run: AVX" in str(e)
    monkeypatch.setenv("LIGER_ROPE", "cpu_mmx")
    with pytest.raises(CORE_ERROR, match="cpu_avx512"):
        rope(*inputs((1, 1, 1, 2, 8, 8), device)[:2], *tables(1, 2, 8))


def test_every_cuda_variant(monkeypatch, device):
    """The scalar kernel takes everything the vector kernels take, and gives the same bits."""
    if device == "cpu":
        pytest.skip("the GPU's variants")
    for shape in SHAPES:
        for dtype in DTYPES:
            for channels in ("halves", "pairs", "pairs_to_halves"):
                cos, sin = tables(shape[0], shape[3], shape[5], device, dtype)
                results = {}
                for variant in ("cuda_vectors", "cuda_half_vectors", "cuda_scalars"):
                    monkeypatch.setenv("LIGER_ROPE", variant)
                    try:
                        results[variant] = run(rope, *inputs(shape, device, dtype), cos, sin, rotary_dim=shape[5], channels=channels)
                    except CORE_ERROR as e:
                        assert "cannot run" in str(e)
                for result in results.values():
                    for a, b in zip(result, results["cuda_scalars"], strict=True):
                        assert torch.equal(a, b)


def test_large_offsets(device):
    """C79: more than 2^31 elements, and more than 65535 rows (C43)."""
    if device == "cpu":
        pytest.skip("2^31 elements take minutes here")
    tokens, heads, dim = 262200, 65, 128  # 2.18e9 elements
    if torch.cuda.mem_get_info(device)[0] < 4 * tokens * heads * dim * 2:
        pytest.skip("needs 18 GB of free GPU memory")
    q = torch.empty(1, tokens, heads, dim, device=device, dtype=torch.bfloat16).normal_().transpose(1, 2)
    cos, sin = tables(1, tokens, dim, device)
    out = liger_rotary_pos_emb_one(q, cos, sin)
    for t in (0, 65536, tokens - 1):
        want = reference_one(q[:, :, t : t + 1].double(), cos[:, t : t + 1].double(), sin[:, t : t + 1].double())
        assert_accurate(out[:, :, t : t + 1], want, 1e-5)
