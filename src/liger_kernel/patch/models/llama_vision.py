"""Llama 4, Mllama (Llama 3.2 Vision) and Pixtral, a vision transformer built like Llama."""

from liger_kernel.patch.families import (
    HALF_ROPE,
    NO_PLAIN_MLP,
    ROUND_THEN_SCALE,
    SWIGLU_PARAMETERS,
    WITHOUT_WEIGHT,
    image_row,
    with_layer_norm,
)
from liger_kernel.patch.specs import Glu, Head, Model, Norm, Replacement

_CONDITIONAL = dict(function="lce_forward_conditional_generation")
_KINDS = ("ForConditionalGeneration", "ForCausalLM", "TextModel")
_COMPLEX = {"apply_rotary_emb": Replacement("llama4_rope", "liger_llama4_text_rotary_pos_emb"),
            "vision_apply_rotary_emb": Replacement("llama4_rope", "liger_llama4_vision_rotary_pos_emb")}
_TILES = dict(hidden_size=64, intermediate_size=96, num_channels=3, image_size=16, patch_size=4)

MODELS = (
    image_row("llama4", "Llama4", (*SWIGLU_PARAMETERS, ("layer_norm", True)),
              {"Llama4TextRMSNorm": Norm(eps="eps"), "Llama4TextL2Norm": WITHOUT_WEIGHT}, {"Llama4TextMLP": Glu()}, _COMPLEX,
              head=dict(_CONDITIONAL, backbone="hidden_states", head="language_model.lm_head"),
              heads={"Llama4ForCausalLM": Head("llama4")},
              left={"Llama4TextExperts": "its tokens come sorted, and all experts get as many", "Llama4VisionMLP": NO_PLAIN_MLP,
                    "Llama4VisionPixelShuffleMLP": "only moves pixels before an MLP without a gate"},
              types=("llama4_text",), kinds=_KINDS, rejects_with=ValueError,
              tiny=dict(head_dim=16, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=80, moe_layers=[1], image=dict(
                  vision_config=dict(_TILES, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vision_output_dim=64,
                                     projector_input_dim=64, projector_output_dim=64,
                                     rope_parameters=dict(rope_theta=10000.0, rope_type="default")),
                  image_token_index=999, boi_token_index=998, eoi_token_index=997, tokens=4))),
    image_row("mllama", "Mllama", with_layer_norm(SWIGLU_PARAMETERS), {"MllamaTextRMSNorm": ROUND_THEN_SCALE}, {"MllamaTextMLP": Glu()},
              HALF_ROPE, _CONDITIONAL, heads={"MllamaForCausalLM": Head("mllama")},
              left={"MllamaVisionMLP": NO_PLAIN_MLP}, types=("mllama_text_model",), kinds=_KINDS, rejects_with=ValueError,
              tiny=dict(cross_attention_layers=[1], image=dict(
                  vision_config=dict(**_TILES, num_hidden_layers=2, num_global_layers=1, attention_heads=4, max_num_tiles=2,
                                     intermediate_layers_indices=[1], vision_output_dim=128, supported_aspect_ratios=[[1, 1], [1, 2]]),
                  image_token_index=999, tokens=0))),
    Model("pixtral", (("rope", True), ("rms_norm", True), ("swiglu", True), ("model", None)), {"PixtralRMSNorm": ROUND_THEN_SCALE},
          {"PixtralMLP": Glu(rename=False)}, {"apply_rotary_pos_emb": Replacement("model.pixtral", "liger_rotary_pos_emb_pixtral")},
          accepts=("PixtralVisionModel",), rejects_with=ValueError,
          tiny=dict(image=dict(**_TILES, num_hidden_layers=2, num_attention_heads=4, hidden_act="silu", tokens=0))),
)
