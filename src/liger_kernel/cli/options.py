"""Options that would be accepted and ignored: refused, by name."""

import typer

from liger_kernel.cli import require


def refuse(option, others):
    """BadParameter for one of `others`, {name: value}, that was given and that `option` leaves without effect."""
    for name, value in others.items():
        if value is not None:
            raise typer.BadParameter(f"{option} has no use for {name}")


def refuse_all_but(context, option, *allowed):
    """BadParameter for parameters of the running command that were given and that `option` leaves without effect."""
    def given(parameter):
        source = context.get_parameter_source(parameter.name)
        return parameter.name not in allowed and source is not None and source.name == "COMMANDLINE"

    def name(parameter):
        off = parameter.secondary_opts if context.params[parameter.name] is False else ()
        return (*off, *parameter.opts)[0] if parameter.opts[0].startswith("-") else parameter.name.upper()

    names = [name(parameter) for parameter in context.command.params if given(parameter)]
    if names:
        raise typer.BadParameter(f"{option} has no use for {', '.join(names)}")


def check_from(context, source, plots, *allowed):
    """--from measures nothing."""
    if source is not None:
        refuse_all_but(context, "--from reads a file and measures nothing: it", "source", "plots", "out", *allowed)
    if plots is not None:
        require("matplotlib", purpose="--plots")
