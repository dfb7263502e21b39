"""GLM-4V: the vision transformer has RMSNorms and gated MLPs like the decoder."""

from liger_kernel.patch.experts import EXPERTS
from liger_kernel.patch.families import (
    FUSED_GATE_UP,
    HALF_ROPE,
    MOE_MLP,
    ROUND_THEN_SCALE_IN_RESIDUAL,
    SWIGLU_PARAMETERS,
    VISION_MLP,
    VISION_ROPE,
    defaults,
    image_row,
)
from liger_kernel.patch.specs import Replacement

_PARAMETERS = defaults(SWIGLU_PARAMETERS, rope=False)
_PAIRS = {"apply_rotary_pos_emb": Replacement("rope", "liger_rotary_pos_emb_interleaved_table")}
_TINY = dict(head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 2], partial_rotary_factor=0.5))
_IMAGE = dict(
    vision_config=dict(depth=2, hidden_size=64, num_heads=4, patch_size=4, image_size=24, out_hidden_size=64, intermediate_size=96,
                       spatial_merge_size=2, temporal_patch_size=2),
    image_token_id=999, video_token_id=998, image_start_token_id=997, image_end_token_id=996, video_start_token_id=995,
    video_end_token_id=994, tokens=6)

MODELS = (
    image_row("glm4v", "Glm4v", _PARAMETERS, {"Glm4vRMSNorm": ROUND_THEN_SCALE_IN_RESIDUAL},
              {"Glm4vTextMLP": FUSED_GATE_UP, "Glm4VisionMlp": VISION_MLP}, {**_PAIRS, **VISION_ROPE},
              types=("glm4v_text",), tiny={**_TINY, "image": _IMAGE}),
    image_row("glm4v_moe", "Glm4vMoe", _PARAMETERS,
              {"Glm4vMoeRMSNorm": ROUND_THEN_SCALE_IN_RESIDUAL, "Glm4vMoeTextRMSNorm": ROUND_THEN_SCALE_IN_RESIDUAL},
              {"Glm4vMoeTextMLP": MOE_MLP, "Glm4vMoeTextExperts": EXPERTS, "Glm4vMoeisionMlp": VISION_MLP},
              {**HALF_ROPE, **VISION_ROPE}, dict(router_loss=True), types=("glm4v_moe_text",),
              tiny={**_TINY, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
                    "image": _IMAGE}),
)
