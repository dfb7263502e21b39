"""LLaVA, InternVL and SmolVLM: any vision model before any decoder, whose own rows patch them."""

from liger_kernel.patch.families import NO_PLAIN_MLP, ROUND_THEN_SCALE, image_row

_LOSSES = (("cross_entropy", False), ("fused_linear_cross_entropy", True))
_NORMS = (("rms_norm", True), ("layer_norm", True))
_TAIL = (("model", None), ("**kwargs", None))
_TINY = dict(model_type="llama")
_VISION = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4)

MODELS = (
    image_row("llava", "Llava", (*_LOSSES, *_TAIL), kinds=("ForConditionalGeneration", "Model"), tiny={**_TINY, "image": dict(
        vision_config=dict(model_type="pixtral", **{**_VISION, "hidden_act": "silu"}), image_token_index=999, vision_feature_layer=-1,
        vision_feature_select_strategy="full", tokens=16)}),
    image_row("internvl", "InternVL", (*_LOSSES, *_NORMS, *_TAIL), {"InternVLVisionRMSNorm": ROUND_THEN_SCALE},
              kinds=("ForConditionalGeneration", "Model"), left={"InternVLVisionMLP": NO_PLAIN_MLP},
              tiny={"model_type": "qwen2", "image": dict(vision_config={**_VISION, "use_qk_norm": True}, image_token_id=999, tokens=4)}),
    image_row("smolvlm", "SmolVLM", (*_LOSSES, *_NORMS, *_TAIL), kinds=("ForConditionalGeneration", "Model"),
              left={"SmolVLMVisionMLP": NO_PLAIN_MLP, "SmolVLMSimpleMLP": "a single linear layer"},
              tiny={**_TINY, "image": dict(vision_config=_VISION, image_token_id=999, scale_factor=2, tokens=4)}),
)
