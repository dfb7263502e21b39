"""The GRPO losses against TRL's own formulas, where TRL is installed."""

import collections
import types

import pytest
import torch

pytest.importorskip("trl")
try:
    from trl import GRPOTrainer
except (ImportError, RuntimeError) as error:  # its own requirements
    pytest.skip(f"trl's GRPOTrainer: {error}", allow_module_level=True)

from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from liger_kernel.chunked_loss.ref_grpo import log_probs
from liger_kernel.chunked_loss.test_grpo import LEVELS, inputs


def theirs(logp, mask, advantages, ref, old, ratio, loss_type, level, beta, **options):
    """TRL's loss of log-probabilities and its metrics, from a trainer with just the attributes that it reads."""
    arguments = {"delta": options.get("delta"), "use_bias_correction_kl": options.get("use_bias_correction_kl", False),
                 "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
                 "vespo_lambda_neg": 2.0, "steps_per_generation": 1}
    accelerator = types.SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t)
    model = types.SimpleNamespace(training=True)
    trainer = types.SimpleNamespace(
        args=types.SimpleNamespace(**arguments), accelerator=accelerator, model=model, aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level=level, beta=beta, epsilon_low=0.2, epsilon_high=0.25, loss_type=loss_type,
        use_vllm=ratio is not None, vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
        max_completion_length=17, _entropy_bonus_enabled=False, _metrics={"train": collections.defaultdict(list)},
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros_like(logp), None), use_adaptive_entropy=False,
        entropy_coef=0.0, temperature=1.0)
    sequences = len(mask)
    prompt = torch.zeros(sequences, 1, dtype=torch.int64)
    batch = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask.long(), "completion_mask": mask, "advantages": advantages,
             "old_per_token_logps": old, "ref_per_token_logps": ref, "num_items_in_batch": mask.sum()}
    if ratio is not None:
        batch["importance_sampling_ratio"] = ratio
    return GRPOTrainer._compute_loss(trainer, model, batch), trainer._metrics["train"]


@pytest.mark.parametrize("importance", [None, "tokens"])
@pytest.mark.parametrize("options", [{}, {"delta": 1.1}, {"use_bias_correction_kl": True}], ids=["plain", "delta", "corrected kl"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type, level", LEVELS)
def test_against_trl(loss_type, level, beta, options, importance):
    x, weight, ids, mask, advantages, b, ref, old, ratio = inputs(bias=True, importance=importance)
    if loss_type == "luspo" and (level == "token" or beta or importance):
        mask = torch.ones_like(mask)  # TRL leaves masked tokens out of luspo's sum
    mask[1] = 1
    module = LigerFusedLinearGRPOLoss(
        beta=beta, use_ref_model=beta != 0, epsilon_low=0.2, epsilon_high=0.25, loss_type=loss_type, max_completion_length=17,
        importance_sampling_level=level, temperature=0.8, **options)
    got = [t.clone().requires_grad_() for t in (x, weight, b)]
    loss, metrics = module(got[0], got[1], ids, mask, advantages, got[2], ref if beta else None, old, vllm_is_ratio=ratio,
                     num_items_in_batch=mask.sum())
    loss.backward()
    want = [t.double().requires_grad_() for t in (x, weight, b)]
    logp = log_probs(want[0], want[1], ids, want[2], 0.8)
    truth, logged = theirs(logp, mask.double(), advantages.double(), ref.double(), old.double(), None if ratio is None else ratio.double(),
                           loss_type, level, beta, **options)
    truth.backward()
    torch.testing.assert_close(loss.double(), truth, rtol=1e-4, atol=1e-6)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.grad.double(), w.grad, rtol=1e-3, atol=1e-5)
    if beta:
        torch.testing.assert_close(float(metrics[0]), logged["kl"][0], rtol=1e-4, atol=1e-6)
    clipped = logged.get("clip_ratio/region_mean") or logged.get("cispo_clip_ratio")
    if clipped and level == "token" and "delta" not in options:  # else TRL's is a mean over sequences, or of the bounded ratio
        torch.testing.assert_close(float(metrics[-1]), clipped[0], rtol=1e-4, atol=1e-6)
