"""Nemotron and Muse Glimmer: models that share little with the other families."""

from liger_kernel.patch.families import HALF_ROPE, NO_PLAIN_MLP, SWIGLU_PARAMETERS, around_one, image_row, with_layer_norm
from liger_kernel.patch.specs import Glu, Head, LayerNorm, Model, Norm, ReLUSquared, Replacement

_LOSSES = (("cross_entropy", False), ("fused_linear_cross_entropy", True))

MODELS = (
    Model("nemotron", (("relu_squared", True), *_LOSSES, ("model", None), ("**kwargs", None)), {
        "NemotronLayerNorm1P": LayerNorm(weight_offset=1.0)}, {"NemotronMLP": ReLUSquared()}, HALF_ROPE,
          {"NemotronForCausalLM": Head("nemotron")}, tiny=dict(head_dim=16)),
    image_row("muse_glimmer", "MuseGlimmer", with_layer_norm(SWIGLU_PARAMETERS),
              {"MuseGlimmerTextCenteredRMSNorm": around_one("LigerRMSNormForMuseGlimmerTextCentered"),
               "MuseGlimmerRMSNorm": Norm(Replacement("rms_norm", "LigerRMSNormForMuseGlimmer"), 0.0, "gemma", False, "eps", weight=False)},
              {"MuseGlimmerTextMLP": Glu(Replacement("swiglu", "LigerSwiGLUMLPForMuseGlimmer"))},
              {**HALF_ROPE, "apply_rotary_pos_emb_vision": Replacement("model.muse_glimmer", "liger_rotary_pos_emb_vision")},
              dict(scale="config.text_config.output_multiplier", softcap="config.text_config.final_logit_softcapping"),
              left={"MuseGlimmerVisionMLP": NO_PLAIN_MLP}, types=("muse_glimmer_text",),
              tiny=dict(head_dim=16, final_logit_softcapping=0.5, output_multiplier=0.7, image=dict(
                  vision_config=dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, patch_size=4,
                                     pos_emb_height=8, pos_emb_width=8),
                  out_hidden_size=256, projector_hidden_size=48, image_token_id=999, video_token_id=998, tokens=6))),
)
