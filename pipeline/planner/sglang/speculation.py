"""The speculative part of a launch line: algorithm, steps, tokens to verify, draft model.

SGLang arg_groups/speculative_hook.py, 0.5.23.
"""

from pipeline.planner.sglang.flags import LaunchFlags
from schemas.plan import BuiltInDraft, CompressedCache, ModelFacts, NoSpeculation, Speculation

# DFLASH verifies one block; both known Qwen3.8 drafts and the engine's fallback use 16 where the
# draft's config gives no size.
_DFLASH_BLOCK = 16
# DSPARK verifies its block and one token more.
# assumed: block_size of the published Qwen3.8 and DeepSeek-V4 DSpark drafts
_DSPARK_BLOCK = 7


def speculation_of(flags: LaunchFlags, model: ModelFacts) -> NoSpeculation | Speculation:
    """Return the speculation of a launch line, with SGLang's defaults applied."""
    algorithm = flags.text("speculative-algorithm").upper()
    if not algorithm or algorithm == "NONE":
        return NoSpeculation()
    path = flags.text("speculative-draft-model-path")
    steps, topk, tokens = _shape(flags, model, algorithm)
    return Speculation(
        algorithm="EAGLE" if algorithm == "NEXTN" else algorithm,
        steps=steps,
        topk=topk,
        num_draft_tokens=tokens,
        draft_path=path,
        built_in=_built_in(flags, model, algorithm, path),
    )


def _shape(flags: LaunchFlags, model: ModelFacts, algorithm: str) -> tuple[int, int, int]:
    steps = flags.number("speculative-num-steps")
    topk = flags.number("speculative-eagle-topk")
    tokens = flags.number("speculative-num-draft-tokens")
    if algorithm == "DFLASH":
        size = tokens or flags.number("speculative-dflash-block-size") or _DFLASH_BLOCK
        return size, 1, size
    if algorithm == "DSPARK":
        block = flags.number("speculative-dspark-block-size")
        size = tokens or (block + 1 if block else _DSPARK_BLOCK + 1)
        return size - 1, 1, size
    if algorithm == "NGRAM":
        return steps or 12, topk or 10, tokens or 12
    if steps is None:
        old_tree = model.architecture in ("LlamaForCausalLM", "Grok1ForCausalLM")
        auto_steps, auto_topk, auto_tokens = (5, 4, 8) if old_tree else (3, 1, 4)
        return auto_steps, topk or auto_topk, tokens or auto_tokens
    topk = topk or 1
    # A chain verifies all drafted tokens and the one before them.
    return steps, topk, steps + 1 if topk == 1 else tokens or steps + 1


def _built_in(flags: LaunchFlags, model: ModelFacts, algorithm: str, path: str) -> bool:
    if algorithm in ("EAGLE", "NEXTN", "EAGLE3"):
        if not path or path == flags.model_path:
            return isinstance(model.draft, BuiltInDraft)
        return path.lower().endswith("nextn") and isinstance(model.draft, BuiltInDraft)
    # DeepSeek-V4 checkpoints contain their DSpark layers.
    return algorithm == "DSPARK" and not path and isinstance(model.cache, CompressedCache)
