"""Records of the memory planner: card, model, launch and plan.

Bytes are ints and per GPU unless the name says otherwise. GiB (2^30 bytes) appears only in the JSON
of a plan and in printed text.
"""

import json
from dataclasses import asdict, dataclass
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
    """A card. SGLang picks defaults by `smi_mib`; CUDA can allocate `total_bytes`."""

    name: str
    compute_capability: int
    smi_mib: int
    total_bytes: int
    context_bytes: int
    """Memory of the CUDA context and the driver, in use on one rank before the weights load."""
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
    """Keys and values per head, for grouped-query and multi-head attention."""

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaCache:
    """Latent vector per token, which tensor parallelism does not divide."""

    layers: int
    kv_lora_rank: int
    rope_dim: int
    expanded_dim: int
    """Key and value of one head, as a prompt's attention expands them from the latent vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMlaCache:
    """Latent vector per token, and an index key in the layers that select tokens."""

    layers: int
    kv_lora_rank: int
    rope_dim: int
    index_heads: int
    index_head_dim: int
    index_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingCache:
    """Full-attention layers, and layers that keep only a window."""

    full: GqaCache
    window: GqaCache
    window_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparseCache:
    """Keys and values per head, with an index key (and in some an index value) in sparse layers."""

    layers: int
    kv_heads: int
    head_dim: int
    index_dim: int
    index_key_layers: int
    index_key_value_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedCache:
    """DeepSeek-V4: a window in every layer, and older latents compressed by 4 or by 128.

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
    """Model without recurrent states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearState:
    """Recurrent state of the linear-attention layers."""

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
    """Text model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """Vision encoder. SGLang's rule for the memory fraction reads the first two fields."""

    hidden_size: int
    layers_seen_by_sglang: int
    params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """Dense feed-forward layers."""

    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts; `intermediate_size` is that of one expert."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    input_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDraft:
    """Checkpoint without a draft head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInDraft:
    """MTP layers of the checkpoint; `declared` if SGLang can read their number."""

    layers: int
    declared: bool
    tensors: tuple[TensorGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRule:
    """Rule of a quantisation config: modules that match `pattern` are stored as `format`."""

    pattern: str
    format: WeightFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFormat:
    """Formats of the weights: the first matching rule, else the default of the scope."""

    base: WeightFormat
    rules: tuple[FormatRule, ...]
    scope: Literal["linears", "experts", "listed"]
    group_size: int
    fp8_kv_cache: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of a checkpoint."""

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
    """Cached tokens that a step attends to; 0 for all."""
    cache: KvLayout
    state: StateLayout
    vision: NoVision | Vision
    ffn: Dense | Moe
    draft: NoDraft | BuiltInDraft
    tensors: tuple[TensorGroup, ...]
    format: CheckpointFormat
    multiplied_in_16_bits: bool
    """True if four-bit weights are widened before they are multiplied."""
    rotary_bytes: int
    """Tables of sines and cosines, whole on each GPU."""
    checkpoint_bytes: int
    nearest_family: bool
    assumptions: tuple[str, ...]
    stored: "ModelFacts | None" = None
    """Facts of the files, where the flags of a launch change them."""


# --- the launch ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSpeculation:
    """Decoding of one token per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding: a step verifies `num_draft_tokens`, drafted in `steps` with `topk`."""

    algorithm: str
    steps: int
    topk: int
    num_draft_tokens: int
    draft_path: str
    built_in: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of a launch, with SGLang's own defaults filled in."""

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
    """Row of the memory table, which adds up to the card."""

    name: str
    bytes: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadroomItem:
    """Memory outside the static fraction."""

    name: str
    bytes: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory table of one GPU. The rows sum to `total_bytes`."""

    total_bytes: int
    rows: tuple[BudgetRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Tokens, states and requests that fit at once, per data-parallel rank."""

    max_total_num_tokens: int
    swa_tokens: int
    state_slots: int
    max_running_requests: int
    limited_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Flag to change, and its effect."""

    flag: str
    value: str
    effect: str
    reason: str
    argv: tuple[str, ...]
    """Whole launch line with all that changes; empty where nothing helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Forecast of a launch, for one GPU of the group."""

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
    """Figures from an engine log, which replace the assumed ones."""

    model: str
    gpu: str
    release: str
    free_before_load_bytes: int | None
    weights_bytes: int | None
    draft_weights_bytes: int | None
    graph_bytes: int | None
    layout: str | None = None
    """Ranks and stages of the launch, as `layout_name` writes them; None where not recorded."""


# --- plans that are tried -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOption:
    """A launch plan of the search, and its forecast for one engine."""

    words: tuple[str, ...]
    """Launch flags."""
    tokens_per_s: float
    log_sd: float
    """Error of the forecast that other plans on the card do not share, of the logarithm."""

    @property
    def name(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrial:
    """Plans that an engine had to choose from, and what came of those that it ran."""

    card: str
    options: tuple[PlanOption, ...]
    """Distinct plans, the forecast's best first."""
    shared_log_sd: float
    """Error of the forecasts that all plans on the card share."""
    output_tokens_mean: float
    running: str | None
    """Name of the plan that it runs; None after a step down from it."""
    failed: tuple[str, ...] = ()
    """Names of plans that failed on it."""
    start_s: float = 0.0
    """Time that its last start took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Forecast and measured rate of a plan that engines ran."""

    name: str
    forecast_tokens_per_s: float
    tokens_per_s: float | None
    """Measured rate; None while too little is read, or if the plan failed."""
    log_sd: float | None
    has_failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CardResult:
    """Outcome of the trial so far on one kind of card."""

    card: str
    best: str
    """Name of the plan that engines start with."""
    plans: tuple[PlanResult, ...]


def results_text(results: tuple[CardResult, ...]) -> str:
    return json.dumps([asdict(result) for result in results], indent=1)


def results_from_text(text: str) -> tuple[CardResult, ...]:
    """Read results. Raises ValueError, TypeError or KeyError for another file."""
    return tuple(
        CardResult(
            card=result["card"],
            best=result["best"],
            plans=tuple(PlanResult(**plan) for plan in result["plans"]),
        )
        for result in json.loads(text)
    )
