"""The bytes that each op saves for backward, read off the autograd graph: what its nodes hold, each piece of memory once."""


def nodes_of(root):
    """Every node of a graph below `root`, in the order of forward."""
    found, open_nodes = set(), [root]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            open_nodes += [below for below, _ in node.next_functions]
    return sorted(found, key=lambda node: node._sequence_nr())


def tensors_of(node):
    """The tensors that a node saved: PyTorch's own have an attribute each, a Python autograd.Function a tuple."""
    import torch

    values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    values += getattr(node, "saved_tensors", ())
    for value in values:
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor


def saved_bytes(loss, parameters):
    """[{"op", "tensors", "bytes"}], most bytes first. A tensor counts for the first op that saved it; parameters do not count.

    Args:
        loss: result of a forward without gradient checkpointing, whose graph must still be whole.
        parameters: tensors that exist anyway.
    """
    seen, found = {p.untyped_storage().data_ptr() for p in parameters}, {}
    for node in nodes_of(loss.grad_fn):
        for tensor in tensors_of(node):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                entry = found.setdefault(node.name(), {"op": node.name().removesuffix("0").removesuffix("Backward"), "tensors": 0,
                                                       "bytes": 0})
                entry["tensors"] += 1
                entry["bytes"] += storage.nbytes()
    return sorted(found.values(), key=lambda entry: -entry["bytes"])
