"""Decoders whose layers are partly or also recurrent: Qwen3-Next, Qwen3.5 (which sees too), Falcon-H1."""

from liger_kernel.patch.experts import EXPERTS
from liger_kernel.patch.families import (
    HALF_ROPE,
    MOE_MLP,
    NO_PLAIN_MLP,
    SWIGLU_PARAMETERS,
    VISION_ROPE,
    around_one,
    decoder,
    defaults,
)
from liger_kernel.patch.specs import GatedNorm, Glu, Head, Replacement

_NORM = around_one("LigerRMSNormForQwen3Next")
_ROPES = {**HALF_ROPE, **VISION_ROPE}
_PARAMETERS = defaults(SWIGLU_PARAMETERS, rope=False)
_TINY = dict(head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
             layer_types=["linear_attention", "full_attention"])
_TINY_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=40)
_IMAGE = dict(
    vision_config=dict(depth=2, hidden_size=64, num_heads=4, patch_size=4, out_hidden_size=64, spatial_merge_size=2, intermediate_size=96,
                       num_position_embeddings=16),
    image_token_id=999, video_token_id=998, vision_start_token_id=997, vision_end_token_id=996, tokens=6)

MODELS = (
    decoder("qwen3_next", "Qwen3Next", _NORM, MOE_MLP, parameters=_PARAMETERS, mlps={"Qwen3NextExperts": EXPERTS},
            norms={"Qwen3NextRMSNormGated": GatedNorm()}, head=dict(router_loss=True),
            accepts=("Qwen3NextForCausalLM", "Qwen3NextModel"), tiny={**_TINY, **_TINY_EXPERTS, "mlp_only_layers": [0]}),
    decoder("qwen3_5", "Qwen3_5", _NORM, MOE_MLP, _ROPES, _PARAMETERS,
            norms={"Qwen3_5RMSNormGated": GatedNorm()},
            heads={"Qwen3_5ForConditionalGeneration": Head("qwen3_5", "lce_forward_for_multimodal")},
            left={"Qwen3_5VisionMLP": NO_PLAIN_MLP}, types=("qwen3_5_text",),
            accepts=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5TextModel"), tiny={**_TINY, "image": _IMAGE}),
    decoder("qwen3_5_moe", "Qwen3_5Moe", _NORM, MOE_MLP, _ROPES, _PARAMETERS, mlps={"Qwen3_5MoeExperts": EXPERTS},
            norms={"Qwen3_5MoeRMSNormGated": GatedNorm()}, head=dict(router_loss=True), heads={"Qwen3_5MoeForConditionalGeneration": Head(
                "qwen3_5_moe", "lce_forward_conditional_generation", router_loss=True)},
            left={"Qwen3_5MoeVisionMLP": NO_PLAIN_MLP},
            types=("qwen3_5_moe_text",),
            accepts=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeTextModel"),
            tiny={**_TINY, **_TINY_EXPERTS, "image": _IMAGE}),
    decoder("falcon_h1", "FalconH1", mlp=Glu(Replacement("swiglu", "LigerFalconH1SwiGLUMLP")), head=dict(scale="model.lm_head_multiplier"),
            norms={"FalconH1RMSNormGated": GatedNorm(norm_before_gate=None, casting_mode="gemma", groups="n_groups")},
            tiny=dict(head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16,
                      mamba_chunk_size=8, lm_head_multiplier=0.5, mlp_multipliers=[0.7, 1.3])),
)
