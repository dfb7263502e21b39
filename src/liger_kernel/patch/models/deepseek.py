"""DeepSeek: latent attention, whose latents are normalised too, and a mixture of experts with shared ones."""

from liger_kernel.patch.experts import EXPERTS
from liger_kernel.patch.families import SWIGLU_PARAMETERS, WITHOUT_WEIGHT, decoder, defaults
from liger_kernel.patch.specs import Norm, Replacement

_PARAMETERS = defaults(SWIGLU_PARAMETERS, rope=False)
_TINY = dict(head_dim=16, q_lora_rank=24, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4,
             num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=48, first_k_dense_replace=1, num_key_value_heads=4)

MODELS = (
    decoder("deepseek_v2", "DeepseekV2", ropes={"apply_rotary_emb": Replacement("rope", "liger_rotary_pos_emb_complex")},
            mlps={"DeepseekV2Experts": EXPERTS}, parameters=_PARAMETERS, tiny=_TINY),
    decoder("deepseek_v3", "DeepseekV3", ropes={
        "apply_rotary_pos_emb": Replacement("rope", "liger_rotary_pos_emb"),
        "apply_rotary_pos_emb_interleave": Replacement("rope", "liger_rotary_pos_emb_deinterleave"),
    }, mlps={"DeepseekV3Experts": EXPERTS}, parameters=_PARAMETERS, tiny=_TINY),
    decoder("deepseek_v4", "DeepseekV4", Norm(casting_mode=None), None, {}, defaults(_PARAMETERS, swiglu=False),
            norms={"DeepseekV4UnweightedRMSNorm": WITHOUT_WEIGHT}, head=dict(router_loss=True), left={
                "DeepseekV4Experts": "no op yet for clamped gates",
                "DeepseekV4MLP": "no op yet for clamped gates",
                "apply_rotary_pos_emb": "no op yet that turns the last channels",
            }, tiny=dict(head_dim=32, q_lora_rank=24, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, o_groups=2,
                         o_lora_rank=16, index_n_heads=2, index_head_dim=16, index_topk=4, num_key_value_heads=1,
                         layer_types=["compressed_sparse_attention", "heavily_compressed_attention"], mlp_layer_types=["moe", "moe"],
                         compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8))),
)
