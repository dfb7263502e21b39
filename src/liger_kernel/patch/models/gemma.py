"""Gemma: norms with weights around zero (Gemma 4: around one) scaled in fp32, gated tanh-GELU MLP, soft-capped logits."""

from liger_kernel.patch.families import (
    GEGLU_PARAMETERS,
    around_one,
    decoder,
    defaults,
    image_row,
    mentions,
    with_layer_norm,
)
from liger_kernel.patch.specs import Glu, Norm, Replacement

_GEGLU = Glu(Replacement("geglu", "LigerGEGLUMLP"), "gelu_tanh")
_CAPPED, _TEXT_CAPPED = (dict(softcap=f"config.{owner}final_logit_softcapping") for owner in ("", "text_config."))
_CONDITIONAL = ("ForConditionalGeneration",)

_TINY = dict(head_dim=16, query_pre_attn_scalar=16, final_logit_softcapping=0.5)
_TINY_4 = dict(
    head_dim=16, global_head_dim=16, final_logit_softcapping=0.5, hidden_size_per_layer_input=16, vocab_size_per_layer_input=1000,
    num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8, num_kv_shared_layers=2,
    use_double_wide_mlp=True, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=48)
_VISION = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4)
_SIGLIP = dict(**_VISION, model_type="siglip_vision_model", vision_use_head=False)

_GEMMA_3 = decoder(
    "gemma3_text", "Gemma3", around_one("LigerRMSNormForGemma3"), _GEGLU, parameters=GEGLU_PARAMETERS,
    head=dict(file="gemma3", function="causal_forward", **_CAPPED), modeling="gemma3", accepts=("Gemma3ForCausalLM", "Gemma3TextModel"),
    tiny=_TINY)
_GEMMA_4 = decoder(
    "gemma4_text", "Gemma4", Norm(Replacement("rms_norm", "LigerRMSNormForGemma4"), 0.0, "gemma", False, "eps", weight=False), None,
    {"apply_rotary_pos_emb": Replacement("rope", "liger_rotary_pos_emb_one")}, defaults(GEGLU_PARAMETERS, rope=False),
    mlps={"Gemma4TextMLP": Glu(Replacement("geglu", "LigerGEGLUMLPForGemma4"), "gelu_tanh")},
    head=dict(file="gemma4", function="causal_forward", **_CAPPED), left={"Gemma4TextExperts": "no op yet for experts with GELU"},
    modeling="gemma4", accepts=("Gemma4ForCausalLM", "Gemma4TextModel"), tiny=_TINY_4)

MODELS = (
    decoder("gemma", "Gemma", around_one("LigerRMSNormForGemma", in_place=True), _GEGLU, parameters=GEGLU_PARAMETERS,
            tiny=dict(head_dim=16)),
    decoder("gemma2", "Gemma2", around_one("LigerRMSNormForGemma2"), _GEGLU, parameters=GEGLU_PARAMETERS, head=_CAPPED, tiny=_TINY),
    _GEMMA_3,
    image_row("gemma3", "Gemma3", with_layer_norm(GEGLU_PARAMETERS), _GEMMA_3.norms, _GEMMA_3.mlps, _GEMMA_3.ropes,
              dict(function="multimodal_forward"), kinds=_CONDITIONAL, tiny={**_TINY, "image": dict(
                  vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_index=999, boi_token_index=998, eoi_token_index=997,
                  tokens=4)}),
    _GEMMA_4,
    image_row("gemma4", "Gemma4", with_layer_norm(defaults(GEGLU_PARAMETERS, rope=False), default=False), _GEMMA_4.norms, _GEMMA_4.mlps,
              _GEMMA_4.ropes, dict(function="multimodal_forward", **_TEXT_CAPPED),
              left={**_GEMMA_4.left, "Gemma4VisionMLP": "its linears may clip"}, kinds=_CONDITIONAL, tiny={**_TINY_4, "image": dict(
                  vision_config=dict(**_VISION, num_key_value_heads=4, head_dim=16, pooling_kernel_size=2, position_embedding_size=16),
                  audio_config=None, image_token_id=999, video_token_id=998, audio_token_id=997, boi_token_id=996, eoi_token_id=995,
                  boa_token_id=994, eoa_token_index=993, tokens=4)}),
    image_row("paligemma", "PaliGemma", with_layer_norm(GEGLU_PARAMETERS), parts=("gemma", "gemma2"), kinds=_CONDITIONAL,
              head=_TEXT_CAPPED if mentions("paligemma", "final_logit_softcapping") else {},
              tiny={**_TINY, "model_type": "gemma2", "image": dict(vision_config=_SIGLIP, projection_dim=64, image_token_index=999,
                                                                     tokens=16)}),
)
