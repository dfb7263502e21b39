"""Llama and the decoders built like it: RMSNorm before attention and MLP, gated SiLU MLP, half rotation, plain head."""

from liger_kernel.patch.specs import HALF_ROPE, SWIGLU_PARAMETERS, Glu, Head, Model, Norm

MODELS = (
    Model("llama", SWIGLU_PARAMETERS, {"LlamaRMSNorm": Norm()}, {"LlamaMLP": Glu()}, HALF_ROPE, {"LlamaForCausalLM": Head("llama")}),
    Model("mistral", SWIGLU_PARAMETERS, {"MistralRMSNorm": Norm()}, {"MistralMLP": Glu()}, HALF_ROPE,
          {"MistralForCausalLM": Head("mistral")}),
    Model("qwen2", SWIGLU_PARAMETERS, {"Qwen2RMSNorm": Norm()}, {"Qwen2MLP": Glu()}, HALF_ROPE, {"Qwen2ForCausalLM": Head("qwen2")}),
)
