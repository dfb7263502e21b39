"""What the preference losses refuse, and the shapes of kl they take."""

import re

import pytest
import torch

import liger_kernel.chunked_loss as chunked_loss
from liger_kernel.chunked_loss import functional
from liger_kernel.chunked_loss.preference_cases import PAIRED, make
from liger_kernel.chunked_loss.test_preference import on_devices


@on_devices
def test_errors(device):
    DPO = chunked_loss.LigerFusedLinearDPOLoss
    for options in ({"loss_type": "ipo"}, {"loss_type": "x"}, {"loss_type": "exo_pair"}, {"loss_type": "robust", "label_smoothing": 0.5}):
        with pytest.raises(ValueError, match="DPO loss"):
            DPO(**options)
    batch = make(PAIRED["dpo sigmoid"], torch.float32, device)
    apply, tensors = functional.liger_fused_linear_dpo, (batch.x, batch.weight, batch.target, batch.bias, *batch.reference)
    for kind, error in (("ipo", NotImplementedError), ("x", ValueError), ("exo_pair", ValueError)):
        with pytest.raises(error, match="DPO loss"):
            apply(*tensors, -100, 0.1, False, True, True, False, 1, kind)
    with pytest.raises(ValueError, match="ref_input is None"):
        DPO()(batch.weight, batch.x, batch.target)
    with pytest.raises(ValueError, match=r"_input is \(5, 7, 33\)"):
        DPO(use_ref_model=False)(batch.weight, batch.x[:5], batch.target[:5])
    with pytest.raises(ValueError, match=r"\(129, 32\)"):
        DPO(use_ref_model=False)(batch.weight[:, 1:], batch.x, batch.target)
    with pytest.raises(AssertionError, match="out of bounds"):
        DPO(use_ref_model=False)(batch.weight[:10], batch.x, batch.target.clamp(min=10))
    KTOLoss = chunked_loss.LigerFusedLinearKTOLoss
    with pytest.raises(AssertionError, match="preference_labels"):
        KTOLoss()(batch.x, batch.weight, batch.target)
    with pytest.raises(ValueError, match=r"preference_labels \(5,\)"):
        KTOLoss()(batch.x, batch.weight, batch.target, preference_labels=torch.ones(5, dtype=torch.bool, device=device))
    for shape in ((7, 1), (3,), (6, 7)):
        with pytest.raises(ValueError, match=rf"kl is \({shape[0]},"):
            KTOLoss()(batch.x, batch.weight, batch.target, preference_labels=torch.ones(6, dtype=torch.bool, device=device),
                      kl=torch.zeros(shape, device=device))
    for wrong in (batch.target[:1], batch.target[:, :1], batch.target.repeat(2, 1)):
        with pytest.raises(ValueError, match=re.escape(f"nll_target is {tuple(wrong.shape)}, expected (6, 7)")):
            chunked_loss.LigerFusedLinearORPOLoss()(batch.weight, batch.x, batch.target, nll_target=wrong)
    with pytest.raises(ValueError, match=r"ref_input is \(2, 7, 33\)"):
        DPO()(batch.weight, batch.x, batch.target, ref_input=batch.x[:2], ref_weight=batch.weight)
    with pytest.raises(RuntimeError, match="takes fp32, bf16 and fp16"):
        DPO(use_ref_model=False)(batch.weight, batch.x.long(), batch.target)


@on_devices
def test_kl_of_kto_in_every_shape(device):
    """A column of (B, 1), as a trainer may keep it, counts a sequence each, as (B,) does; one element counts for all."""
    batch, loss = make(PAIRED["dpo sigmoid"], torch.float32, device), chunked_loss.LigerFusedLinearKTOLoss()
    x, weight = (t.detach().clone().requires_grad_() for t in (batch.x, batch.weight))
    labels, kl = torch.arange(6, device=device) % 2 == 0, torch.rand(6, device=device)

    def run(kl):
        value = loss(x, weight, batch.target, preference_labels=labels, kl=kl)[0]
        return value, *torch.autograd.grad(value, (x, weight))

    torch.testing.assert_close(run(kl[:, None]), run(kl), rtol=0, atol=0)
    for one in (kl[:1], kl[:1, None], kl[0], float(kl[0])):
        torch.testing.assert_close(run(one), run(kl[:1].expand(6)), rtol=1e-6, atol=1e-7)
