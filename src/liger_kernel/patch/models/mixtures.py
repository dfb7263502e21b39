"""Decoders with a mixture of experts in place of the MLP, or beside a shared one."""

from liger_kernel.patch.experts import EXPERTS
from liger_kernel.patch.families import MOE_MLP, SCALE_THEN_ROUND, SWIGLU_PARAMETERS, decoder, defaults
from liger_kernel.patch.specs import Glu, Replacement

_ROUTED = dict(router_loss=True)

MODELS = (
    decoder("mixtral", "Mixtral", mlp=None, mlps={"MixtralExperts": EXPERTS}, head=_ROUTED,
            tiny=dict(num_local_experts=4, num_experts_per_tok=2)),
    decoder("qwen3_moe", "Qwen3Moe", mlp=MOE_MLP, mlps={"Qwen3MoeExperts": EXPERTS}, head=_ROUTED,
            tiny=dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[0])),
    decoder("qwen2_moe", "Qwen2Moe", mlp=MOE_MLP, mlps={"Qwen2MoeExperts": EXPERTS}, head=_ROUTED,
            tiny=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=40,
                      mlp_only_layers=[0])),
    decoder("olmoe", "Olmoe", mlp=None, mlps={"OlmoeExperts": EXPERTS}, head=_ROUTED,
            tiny=dict(num_experts=4, num_experts_per_tok=2)),
    decoder("glm4_moe", "Glm4Moe", mlp=MOE_MLP, mlps={"Glm4MoeExperts": EXPERTS},
            tiny=dict(head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=48,
                      first_k_dense_replace=1)),
    decoder("hunyuan_v1_moe", "HunYuanMoEV1", mlp=Glu(Replacement("swiglu", "LigerHunyuanV1SwiGLUMLP")),
            mlps={"HunYuanMoEV1Experts": EXPERTS}, head=dict(file="hunyuan_v1", function="lce_forward_moe"),
            tiny=dict(head_dim=16, num_experts=4, moe_topk=2)),
    decoder("gpt_oss", "GptOss", SCALE_THEN_ROUND, None, {"apply_rotary_pos_emb": Replacement("rope", "liger_rotary_pos_emb_gpt_oss")},
            defaults(SWIGLU_PARAMETERS, swiglu=False), head=_ROUTED,
            left={"GptOssExperts": "no op yet for experts with biases and clamped gates",
                  "GptOssMLP": "only holds the router and the experts"},
            tiny=dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                      rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
)
