"""Experts of mixtures whose forward is transformers' eager one: SiLU gates without biases, over the parameters gate_up_proj
(E, 2I, H) and down_proj (E, H, I)."""

from liger_kernel.patch.specs import Glu, Replacement

EXPERTS = Glu(Replacement("experts", "LigerExperts"))
