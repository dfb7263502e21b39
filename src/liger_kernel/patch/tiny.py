"""Tiny random models of the rows' types, for tests and demonstrations."""

import importlib
import inspect

from liger_kernel.patch.models import by_type, rows

_SIZES = dict(
    vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
FIRST_SPECIAL_TOKEN, IMAGE_TOKEN = 990, 999  # of the vocabularies here


def image_types():
    """The model types that take pixels: of rows whose `tiny` says how, the type that is named like the row."""
    return [name for name, row in rows().items() if "image" in row.tiny]


def text_types():
    """One model type a row: the text model's, where the row has one."""
    return [row.types[0] if row.types else name for name, row in rows().items() if row.types or "image" not in row.tiny]


def config(model_type, **changes):
    """A small configuration of `model_type`, with `changes` to its text model's.

    `row.tiny` holds settings of the text model's configuration; its entry "image" those of the configuration around it.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    row = by_type().get(model_type)
    settings = {**_SIZES, **(row.tiny if row else {}), **changes}
    around = settings.pop("image", {})
    if not takes_pixels(model_type):
        return AutoConfig.for_model(model_type, **settings)
    around = {name: value for name, value in around.items() if name != "tokens"}
    if "text_config" in CONFIG_MAPPING[model_type].sub_configs:
        around["text_config"] = settings
    return AutoConfig.for_model(model_type, **around)


def takes_pixels(model_type):
    """Whether models of the type take pixels."""
    return model_type in image_types()


def class_with_head(model_type):
    """The class of the type's row that has a language-model head and takes the type's configuration; None when there is none."""
    from transformers import CONFIG_MAPPING

    row = by_type()[model_type]
    modeling = importlib.import_module(row.module)
    candidates = (getattr(modeling, name, None) for name in row.heads)
    return next((cls for cls in candidates if cls is not None and cls.config_class is CONFIG_MAPPING[model_type]), None)


def causal_lm(model_type, seed=0, **changes):
    """A small model with the type's language-model head, or AutoModel where there is none, with random weights, norm weights and
    biases included."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    settings = config(model_type, **changes)
    cls = class_with_head(model_type) if model_type in by_type() else None
    build = cls._from_config if cls else (AutoModel if model_type in by_type() else AutoModelForCausalLM).from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(settings)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter) if "norm" in name else 0.02 * torch.randn_like(parameter))
    return model


def images(model, batch):
    """Arguments for `batch` random images, as the model's processor would make them: {name: tensor}."""
    import torch

    vision, names = getattr(model.config, "vision_config", model.config), inspect.signature(type(model).forward).parameters
    generator = torch.Generator().manual_seed(2)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    def setting(*names):
        return next(value for name in names if (value := getattr(vision, name, None)) is not None)

    channels, patch = getattr(vision, "num_channels", getattr(vision, "in_channels", 3)), setting("patch_size")
    if "image_grid_thw" in names:  # patches of all images in one row after another; as many in time as the model merges
        rows_, columns = 4, 6
        depth = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
        pixels = noise(batch * rows_ * columns, channels * depth * patch * patch)
        return dict(pixel_values=pixels, image_grid_thw=torch.tensor([[1, rows_, columns]] * batch))
    if "image_position_ids" in names:  # patches and where they are
        side = 2 * vision.pooling_kernel_size
        at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).reshape(1, -1, 2)
        return dict(pixel_values=noise(batch, side * side, 3 * patch * patch).sigmoid(), image_position_ids=at.repeat(batch, 1, 1))
    size = setting("image_size")
    size = size[0] if isinstance(size, (list, tuple)) else size
    if "aspect_ratio_ids" in names:  # tiles of an image, which every token may look at
        pixels = noise(batch, 1, vision.max_num_tiles, channels, size, size)
        mask = torch.ones(batch, 1, vision.max_num_tiles, dtype=torch.long)
        return dict(pixel_values=pixels, aspect_ratio_ids=torch.full((batch, 1), vision.max_num_tiles), aspect_ratio_mask=mask)
    if "pixel_attention_mask" in names:
        return dict(pixel_values=noise(batch, 1, channels, size, size))
    return dict(pixel_values=noise(batch, channels, size, size))
