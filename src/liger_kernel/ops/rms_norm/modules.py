"""RMSNorm modules of the model families: the constructors of the classes they replace, with that family's rounding and offset."""

from liger_kernel.ops.rms_norm import LigerRMSNorm


class LigerRMSNormForGemma(LigerRMSNorm):
    """Weights stored around zero: y = x rstd (1 + w) in fp32, rounded once."""

    def __init__(self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=True, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNorm):
    """As Gemma; its norms sit between residual additions, whose gradient must stay whole."""

    def __init__(self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma3(LigerRMSNorm):
    """As Gemma-2; the first parameter is called `dim`, as in Gemma3RMSNorm."""

    def __init__(self, dim, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """y = x rstd w in fp32, rounded once; without a weight when `with_scale` is False."""

    def __init__(self, dim, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """y = x rstd w in fp32, rounded once, as Olmo2RMSNorm computes it.

    `casting_mode` defaults to the "llama" that callers of this class know; "llama" means that arithmetic here.
    """

    def __init__(self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, "gemma" if casting_mode in ("llama", 0) else casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNorm):
    """Llama's arithmetic between residual additions."""

    def __init__(self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNorm):
    """As Gemma-2."""

    def __init__(self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForMuseGlimmer(LigerRMSNorm):
    """y = x rstd w in fp32, rounded once; without a weight, and then without `dim`, when `with_scale` is False."""

    def __init__(self, dim=None, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormForMuseGlimmerTextCentered(LigerRMSNormForGemma2):
    """As Gemma-2."""
