"""What the planner learns about a model, a card and a launch, in the order it is learned.

Bytes are ints and per GPU unless the name says otherwise; GiB (2^30 bytes) appears only in
`plan_json` of `pipeline.planner.plan_output` and in printed text.
"""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["fits", "marginal", "does_not_fit"]
Stage = Literal["weights", "draft_weights", "pool", "state_pool", "graph_capture", "runtime"]
WeightFormat = Literal[
    "fp32", "bf16", "fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "int4-awq", "int4-gptq", "int4",
]  # fmt: skip
Shard = Literal[
    "attention",  # split over the attention-parallel group
    "kv",  # split over the same group, but never under one head
    "mlp",  # split over all tensor-parallel ranks
    "dense_mlp",  # like mlp, unless --moe-dense-tp-size keeps it whole
    "shared_expert",  # like mlp, whole under an all-to-all backend
    "expert",  # split over tensor or expert ranks, the same share either way
    "embedding",
    "head",
    "vision",
    "replicated",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card. `smi_mib` picks SGLang's defaults, `total_bytes` is what CUDA hands out."""

    name: str
    compute_capability: int
    smi_mib: int
    total_bytes: int
    nvlink: bool
    unified_memory: bool
    known: bool


# --- the model -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Weights that share a shape rule. `params` counts all layers, unsharded."""

    names: tuple[str, ...]
    params: int
    shard: Shard
    layers: int
    quantizable: bool
    fixed_bytes_per_param: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaCache:
    """Keys and values by head; covers plain multi-head attention."""

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaCache:
    """One latent vector a token; tensor parallelism does not divide it."""

    layers: int
    kv_lora_rank: int
    rope_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlaCache:
    """A latent vector a token, and an index key in the layers that choose their own tokens."""

    layers: int
    kv_lora_rank: int
    rope_dim: int
    index_head_dim: int
    index_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingCache:
    """Full-attention layers beside layers that keep only a window."""

    full: GqaCache
    window: GqaCache
    window_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseCache:
    """Keys and values by head, with an index key (and sometimes value) in the sparse layers."""

    layers: int
    kv_heads: int
    head_dim: int
    index_dim: int
    index_key_layers: int
    index_key_value_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedCache:
    """DeepSeek-V4: a window in every layer, latents compressed by 4 or by 128 above it.

    `listed_layers` counts the config's entries, draft layers included.
    """

    layers: int
    listed_layers: int
    c4_layers: int
    c128_layers: int
    window_tokens: int


KvLayout = GqaCache | MlaCache | SparseMlaCache | SlidingCache | BlockSparseCache | CompressedCache


@dataclass(frozen=True, slots=True, kw_only=True)
class NoState:
    """No layer keeps a recurrent state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearState:
    """The recurrent state of the linear-attention layers."""

    kind: Literal["gdn", "mamba2", "kda", "conv"]
    layers: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    conv_kernel: int
    ssm_dtype: str


StateLayout = NoState | LinearState


@dataclass(frozen=True, slots=True, kw_only=True)
class NoVision:
    """A text model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """What the encoder adds. SGLang's fraction rule reads its own two fields."""

    hidden_size: int
    layers_seen_by_sglang: int
    params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Every token goes through every weight."""

    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts; `intermediate_size` is one expert's."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    input_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDraft:
    """The checkpoint carries no draft head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInDraft:
    """The checkpoint's own MTP layers; `declared` where SGLang can read their number."""

    layers: int
    declared: bool
    tensors: tuple[TensorGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRule:
    """One line of a quantisation config: modules that match `pattern` are stored as `format`."""

    pattern: str
    format: WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """How the weights are stored: the first rule that matches wins, then the scope's default."""

    base: WeightFormat
    rules: tuple[FormatRule, ...]
    scope: Literal["linears", "experts", "listed"]
    group_size: int
    fp8_kv_cache: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the planner knows about a checkpoint."""

    name: str
    architecture: str
    model_type: str
    layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    uses_mla: bool
    sparse_topk_tokens: int
    """Cached tokens that a step attends to; 0 where it attends to all."""
    cache: KvLayout
    state: StateLayout
    vision: NoVision | Vision
    ffn: Dense | Moe
    draft: NoDraft | BuiltInDraft
    tensors: tuple[TensorGroup, ...]
    format: CheckpointFormat
    multiplied_in_16_bits: bool
    """Four-bit weights are widened before they are multiplied."""
    checkpoint_bytes: int
    nearest_family: bool
    assumptions: tuple[str, ...]


# --- the launch ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSpeculation:
    """One token a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """`num_draft_tokens` are verified in one step; `steps` and `topk` shape the draft."""

    algorithm: str
    steps: int
    topk: int
    num_draft_tokens: int
    draft_path: str
    built_in: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """A launch after SGLang's own defaults are filled in."""

    release: str
    tp_size: int
    pp_size: int
    attention_dp_size: int
    mem_fraction_static: float
    mem_fraction_given: bool
    chunked_prefill_size: int
    max_prefill_tokens: int
    context_length: int
    page_size: int
    attention_backend: str
    kv_cache_dtype: str
    scaled_latent: bool
    decode_graph_max_bs: int
    prefill_graph_buckets: int
    max_running_requests: int | None
    max_running_requests_source: str
    max_total_tokens: int | None
    disable_radix_cache: bool
    mamba_strategy: str
    speculation: NoSpeculation | Speculation
    assumptions: tuple[str, ...]


# --- the answer ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """One row of the table that adds up to the card."""

    name: str
    bytes: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadroomItem:
    """Something the fraction never pays for."""

    name: str
    bytes: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Where one GPU's bytes go. The rows sum to `total_bytes`."""

    total_bytes: int
    rows: tuple[BudgetRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What runs at once. Figures are per data-parallel rank."""

    max_total_num_tokens: int
    swa_tokens: int
    state_slots: int
    max_running_requests: int
    limited_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One flag to change, and what it changes."""

    flag: str
    value: str
    effect: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The forecast of one launch on one GPU of the group."""

    verdict: Verdict
    stage: Stage | None
    message: str
    model: str
    gpu: str
    release_profile: str
    argv: tuple[str, ...]
    settings: PlanSettings
    budget: MemoryBudget
    capacity: Capacity
    free_before_load_bytes: int
    weights_bytes: int
    draft_weights_bytes: int
    kv_bytes_per_token: float
    kv_bytes: int
    state_bytes: int
    intermediate_state_bytes: int
    headroom_bytes: int
    headroom_items: tuple[HeadroomItem, ...]
    requests_at_expected_length: int
    uncertainty_bytes: int
    uncertainty_tokens: int
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    advice: tuple[Advice, ...]
    log_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Figures read from one engine log, which replace the assumed ones."""

    model: str
    gpu: str
    release: str
    free_before_load_bytes: int | None
    weights_bytes: int | None
    draft_weights_bytes: int | None
    graph_bytes: int | None
    layout: str | None = None
    """Ranks and stages of the launch, as `layout_name` writes them; None where not recorded."""
