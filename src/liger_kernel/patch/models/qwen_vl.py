"""Qwen's models of images and video: a rotary vision transformer before a decoder. Qwen3.5 is in `hybrid`."""

from liger_kernel.patch.experts import EXPERTS
from liger_kernel.patch.families import (
    HALF_ROPE,
    MOE_MLP,
    NO_PLAIN_MLP,
    ROUND_THEN_SCALE,
    SWIGLU_PARAMETERS,
    VISION_MLP,
    VISION_ROPE,
    defaults,
    image_row,
    mentions,
    with_layer_norm,
)
from liger_kernel.patch.specs import Glu, Replacement

_ROPES = {**HALF_ROPE, **VISION_ROPE}


def _ropes(name):
    """transformers < 5.17 turns text by sections of channels, one for each of time, height and width."""
    sections = {"apply_multimodal_rotary_pos_emb": Replacement("qwen2vl_mrope", "liger_multimodal_rotary_pos_emb")}
    return {**(sections if mentions(name, "def apply_multimodal_rotary_pos_emb") else HALF_ROPE), **VISION_ROPE}


def _norms(name, *classes):
    """transformers < 5.2 has Qwen2's norm in place of the models' own."""
    return {cls: ROUND_THEN_SCALE for cls in (*classes, "Qwen2RMSNorm") if mentions(name, cls)}


_SECTIONS = dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3]))
_VISION = dict(depth=2, hidden_size=64, num_heads=4, patch_size=4, out_hidden_size=64, spatial_merge_size=2)
_IMAGE = dict(image_token_id=999, video_token_id=998, vision_start_token_id=997, vision_end_token_id=996, tokens=6)
_DEEP = dict(vision_config=dict(_VISION, intermediate_size=96, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]), **_IMAGE)
_INTERLEAVED = dict(head_dim=16, rope_parameters={**_SECTIONS["rope_parameters"], "mrope_interleaved": True})

MODELS = (
    image_row("qwen2_vl", "Qwen2VL", with_layer_norm(SWIGLU_PARAMETERS, "swiglu"), _norms("qwen2_vl", "Qwen2VLRMSNorm"),
              {"Qwen2MLP": Glu()}, _ropes("qwen2_vl"), left={"VisionMlp": NO_PLAIN_MLP}, types=("qwen2_vl_text",),
              tiny={**_SECTIONS, "image": dict(vision_config={**_VISION, "embed_dim": 64}, **_IMAGE)}),
    image_row("qwen2_5_vl", "Qwen2_5_VL", SWIGLU_PARAMETERS, _norms("qwen2_5_vl", "Qwen2_5_VLRMSNorm"),
              {"Qwen2MLP": Glu(), "Qwen2_5_VLMLP": VISION_MLP}, _ropes("qwen2_5_vl"), types=("qwen2_5_vl_text",),
              tiny={**_SECTIONS, "image": dict(vision_config={**_VISION, "intermediate_size": 96, "window_size": 16,
                                                              "fullatt_block_indexes": [1]}, **_IMAGE)}),
    image_row("qwen3_vl", "Qwen3VL", defaults(SWIGLU_PARAMETERS, swiglu=False), {"Qwen3VLTextRMSNorm": ROUND_THEN_SCALE},
              {"Qwen3VLTextMLP": Glu()}, _ROPES, left={"Qwen3VLVisionMLP": NO_PLAIN_MLP}, types=("qwen3_vl_text",),
              tiny={**_INTERLEAVED, "image": _DEEP}),
    image_row("qwen3_vl_moe", "Qwen3VLMoe", SWIGLU_PARAMETERS, {"Qwen3VLMoeTextRMSNorm": ROUND_THEN_SCALE}, {
        "Qwen3VLMoeTextMLP": MOE_MLP, "Qwen3VLMoeTextExperts": EXPERTS}, _ROPES, dict(router_loss=True),
              left={"Qwen3VLMoeVisionMLP": NO_PLAIN_MLP}, types=("qwen3_vl_moe_text",),
              tiny={**_INTERLEAVED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [0],
                    "image": _DEEP}),
)
