"""Names of the reference package about Triton's cache. No kernel here is Triton's."""


def apply_liger_triton_cache_manager():
    """Does nothing: there is no Triton cache to manage. The reference package set TRITON_CACHE_MANAGER here."""
