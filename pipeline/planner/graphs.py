"""Which batch sizes and token counts SGLang captures CUDA graphs for.

Only the counts matter to memory. SGLang arg_groups/cuda_graph_hook.py, 0.5.23; the lists are the
same in 0.5.10 - 0.5.21 as far as read.
"""


def decode_buckets(max_bs: int, *, speculative: bool) -> tuple[int, ...]:
    """Batch sizes of the decode graphs, the maximum included."""
    if speculative:
        sizes = [
            *range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8),
            *range(272, max_bs + 1, 16),
        ]  # fmt: skip
    else:
        sizes = [
            1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_bs + 1, 32),
        ]  # fmt: skip
    kept = [size for size in sizes if size <= max_bs]
    return tuple(kept) if max_bs in kept else (*kept, max_bs)


def prefill_buckets(max_tokens: int) -> tuple[int, ...]:
    """Token counts of the prefill graphs, the maximum included."""
    sizes = [
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
        *range(1280, 4097, 256), *range(4608, max_tokens + 1, 512),
    ]  # fmt: skip
    kept = [size for size in sizes if size <= max_tokens]
    return tuple(kept) if max_tokens in kept or max_tokens < 4 else (*kept, max_tokens)
