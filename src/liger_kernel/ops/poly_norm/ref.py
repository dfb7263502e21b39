"""PolyNorm in plain PyTorch: the fp64 definition, and eager code that runs in the input's dtype."""


def _normalise(u, eps):
    return u * (u.square().mean(-1, keepdim=True) + eps).rsqrt()


def reference(x, weight, bias, eps=1e-6):
    """The definition; run it on fp64 tensors for the truth."""
    return weight[0] * _normalise(x**3, eps) + weight[1] * _normalise(x**2, eps) + weight[2] * _normalise(x, eps) + bias


def eager(x, weight, bias, eps=1e-6):
    """The module of the paper's code: powers and norms in fp32, the rest in x's dtype."""
    powers = [_normalise(x.float() ** p, eps).to(x.dtype) for p in (3, 2, 1)]
    return (weight[0] * powers[0] + weight[1] * powers[1] + weight[2] * powers[2] + bias).to(x.dtype)
