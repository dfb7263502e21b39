"""Cross entropy over a vocabulary that is spread over ranks."""

from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction, LigerVocabParallelCrossEntropy

__all__ = ["LigerVocabParallelCEFunction", "LigerVocabParallelCrossEntropy"]
