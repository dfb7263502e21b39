"""Trainers that never make the logits. Importing the package needs neither trl nor transformers; a trainer needs trl."""


def __getattr__(name):
    if name == "__all__":
        return ["LigerORPOTrainer"]
    if name != "LigerORPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from liger_kernel.transformers.trainer import orpo_trainer

    return orpo_trainer.LigerORPOTrainer
