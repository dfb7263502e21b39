"""Tiny random models of the rows' types, for tests and demonstrations."""

_SIZES = dict(
    vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)


def config(model_type, **changes):
    """A small configuration of `model_type`, with `changes`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**_SIZES, **changes})


def causal_lm(model_type, seed=0, **changes):
    """A small AutoModelForCausalLM with random weights, norm weights and biases included."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(model_type, **changes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter) if "norm" in name else 0.02 * torch.randn_like(parameter))
    return model
