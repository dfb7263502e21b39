"""Llama and the dense decoders built like it: RMSNorm before attention and MLP, gated SiLU MLP, half rotation, one head."""

from liger_kernel.patch.families import FUSED_GATE_UP, ROUND_THEN_SCALE_IN_RESIDUAL, SCALE_THEN_ROUND, SWIGLU_PARAMETERS, decoder, defaults
from liger_kernel.patch.specs import Glu, Replacement

_PAIRS = {"apply_rotary_pos_emb": Replacement("rope", "liger_rotary_pos_emb_interleaved")}

MODELS = (
    decoder("llama", "Llama"),
    decoder("mistral", "Mistral"),
    decoder("ministral", "Ministral", tiny=dict(head_dim=16)),
    decoder("qwen2", "Qwen2"),
    decoder("qwen3", "Qwen3", tiny=dict(head_dim=16)),
    decoder("smollm3", "SmolLM3", tiny=dict(no_rope_layers=[1, 0])),
    decoder("granite", "Granite", parameters=defaults(SWIGLU_PARAMETERS, cross_entropy=True, fused_linear_cross_entropy=False),
            head=dict(scale="1/config.logits_scaling"), tiny=dict(logits_scaling=0.25)),
    decoder("exaone4", "Exaone4", ROUND_THEN_SCALE_IN_RESIDUAL,
            tiny=dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])),
    decoder("hunyuan_v1_dense", "HunYuanDenseV1", mlp=Glu(Replacement("swiglu", "LigerHunyuanV1SwiGLUMLP")), head=dict(file="hunyuan_v1"),
            tiny=dict(head_dim=16)),
    decoder("olmo2", "Olmo2", SCALE_THEN_ROUND),
    decoder("olmo3", "Olmo3", SCALE_THEN_ROUND),
    decoder("phi3", "Phi3", mlp=FUSED_GATE_UP,
            tiny=dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))),
    decoder("glm4", "Glm4", ROUND_THEN_SCALE_IN_RESIDUAL, FUSED_GATE_UP, _PAIRS, defaults(SWIGLU_PARAMETERS, rope=False),
            tiny=dict(head_dim=16)),
)
