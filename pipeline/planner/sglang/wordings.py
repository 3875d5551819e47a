"""Wordings of engine failures in logs, by cause. Used by `failures` alone.

They are those of SGLang 0.4.1 to 0.5.23, torch, NCCL, the hub's client and the Linux kernel. Tables
are in order of strength: lines that match a row are symptoms where an earlier row matches too.
"""

import re
from typing import Literal

CauseKind = Literal[
    "weights",  # out of memory, by the stage that allocated
    "draft_weights",
    "pool",
    "state_pool",
    "graph_capture",
    "runtime",
    "tokens_ran_out",  # the scheduler crashed: no room for the tokens of its own batch,
    "pool_leak",  # a pool's books do not balance,
    "speculation",  # or an exception inside speculative decoding
    "state_path",  # or inside linear attention and its states
    "unbalanced",  # another process uses memory of the card
    "kernel",  # CUDA, driver or kernels do not support the card
    "gpu_fault",  # the card itself: ECC, Xid, illegal access
    "flag",
    "model_missing",
    "hub_refused",
    "hub_unreachable",
    "port",
    "host_memory",
    "nccl",
    "disk_full",
    "watchdog",
    "killed",
    "unknown",
]
LaunchStage = Literal["start", "weights", "draft_weights", "pools", "capture", "ready", "serving"]
Pattern = tuple[CauseKind, re.Pattern[str]]


def _compiled(rows: tuple[tuple[CauseKind, tuple[str, ...]], ...]) -> tuple[Pattern, ...]:
    return tuple((kind, re.compile("|".join(wordings))) for kind, wordings in rows)


_OUT_OF_MEMORY = (
    r"CUDA out of memory",
    r"OutOfMemoryError",
    r"CUDA error: out of memory",
    r"cudaErrorMemoryAllocation",
    r"CUBLAS_STATUS_ALLOC_FAILED",
    r"CUDA_ERROR__OUT_OF_MEMORY",
)
# A failed allocation on the card, whichever stage made it
OOM = re.compile("|".join(_OUT_OF_MEMORY))

# Lines about trouble that the engine survives
HARMLESS = re.compile(
    "|".join(
        (
            r"Max running requests is reset to",
            r"self\.soft=True",
            r"soft watchdog",
            r"Warning\b",
            r"warnings\.warn",
            r"Ignore import error",
            r"[Ff]ailed to import",
            r"trying port",
            r"Fail to set RLIMIT",
        )
    )
)
# Lines that report only that something ended
SYMPTOM = re.compile(
    "|".join(
        (
            r"kill_process_tree called",
            r"Received sigquit",
            r"Triggering SIGQUIT",
            r"SIGQUIT received",
            r"^Killed$",
        )
    )
)
# Frames of a scheduler's traceback, SGLang 0.5.14 to 0.5.23
SPECULATION_FRAME = re.compile(r'File "[^"]*/sglang/srt/[^"]*(?:speculative/|eagle|draft)')
STATE_FRAME = re.compile(
    r'File "[^"]*/sglang/srt/(?!models/)[^"]*'
    r"(?:mamba|/fla/|attention/linear/|linear_attn|linear_attention|gdn|kda)"
)
_CAUSE_ROWS: tuple[tuple[CauseKind, tuple[str, ...]], ...] = (
    # Before the rows of flags and of the start, whose words some of these contain.
    # srt/mem_cache: allocation.py (0.5.14: common.py), memory_pool.py, mamba_radix_cache.py and
    # unified_cache/components/mamba.py; srt/managers/hisparse_coordinator.py. The third is of
    # 0.4.6; where it was, 0.5.14 ends the one request.
    (
        "tokens_ran_out",
        (
            r"(?:Prefill|Decode) out of memory\.",
            r"\bOut of memory\. (?:Try to lower your batch size|Please set a smaller number)",
            r"No space left for only one request",
            r"alloc_req_slots runs out of memory",
            r"Not enough space for mamba",
            r"Can ?not alloc (?:int8 )?mamba",
            r"HiSparse .*(?:failed to allocate|returned None)",
            r"exceeds? the (?:sharded assembly scratch|scratch (?:chunk|prefix) capacity)",
            r"cannot fit the sharded assembly scratch",
        ),
    ),
    # Books of the pools: srt/managers/scheduler_components/invariant_checker.py (0.4.6:
    # scheduler.py), srt/mem_cache/{memory_pool,*radix_cache}.py, unified_cache/ and allocator/.
    # Without the strict check a leak is a warning, which has no name of an exception before it.
    (
        "pool_leak",
        (
            r"^(?:ValueError|AssertionError|RuntimeError): .*[Mm]em(?:ory)? [Ll]eak [Dd]etected",
            r"^(?:ValueError|AssertionError|RuntimeError): .*double[ -]free",
            r"^AssertionError: .*(?:lock_ref|ref_counter|lru list|evict)",
            r"^AssertionError: (?:Donated|Cached) mamba slot is -1",
            r"^AssertionError: (?:FULL invariant broken|_compact_pending\()",
            r"^AssertionError: .*kv_committed_len",
            r"^RuntimeError: committed output length moved backwards",
        ),
    ),
    ("unbalanced", (r"(?:RuntimeError|ValueError): The memory capacity is unbalanced",)),
    (
        "state_pool",
        (
            r"state cache is too small",
            r"Not enough GPU memory for hybrid",
            r"Not enough memory for mamba cache",
        ),
    ),
    (
        "pool",
        (
            r"Loaded weights leave no GPU memory",
            r"cannot hold even one request",
            r"Not enough memory\. Please try to increase",
            r"Not enough memory; increase",
        ),
    ),
    (
        "flag",
        (
            r"(?:error|Error): (?:unrecognized arguments|argument -|ambiguous option)",
            r"error: the following arguments are required",
            r"^ValueError: .*--[a-z-]+.*(?:must|should|cannot|requires|only|incompatible)",
            r"^ValueError: .*--[a-z-]+.*not supported",
            r"^ValueError: \w+ is not supported in (?:\w+ )?attention backend",
            r"^AssertionError: .*(?:--[a-z]|must be |not supported|(?:extra|no)_buffer)",
        ),
    ),
    (
        "disk_full",
        (
            r"No space left on device",
            r"Disk quota exceeded",
            r"\[Errno 28\]",
            r"\[Errno 122\]",
            r"insufficient shared memory \(shm\)",
        ),
    ),
    (
        "hub_refused",
        (
            r"GatedRepoError",
            r"[Cc]annot access gated repo",
            r"is restricted\. You must",
            r"Invalid username or password",
            r"[Ii]nvalid user token",
        ),
    ),
    (
        "model_missing",
        (
            r"Repository Not Found",
            r"RepositoryNotFoundError",
            r"is not a local folder and is not a valid model",
            r"does not appear to have a file named",
            r"Can't load (?:tokenizer|the configuration|the model)",
            r"Cannot find any model weights",
            r"Unrecognized model in",
            r"does not recognize this architecture",
            r"Model architectures? \[?.* (?:is|are) not supported",
            r"HFValidationError",
            r"RevisionNotFoundError",
            r"EntryNotFoundError: 404",
            r"outgoing traffic has been disabled",
            r"Couldn't instantiate the backend tokenizer",
        ),
    ),
    ("model_missing", (r"FileNotFoundError: .*(?:config\.json|tokenizer|safetensors|\.bin)",)),
    ("hub_refused", (r"40[13] Client Error",)),
    (
        "hub_unreachable",
        (
            r"[Cc]ouldn't connect to 'https?://",
            r"LocalEntryNotFoundError",
            r"Connection error, and we cannot find",
            r"Temporary failure in name resolution",
            r"Max retries exceeded with url: /(?!freeze_gc|health|v1|generate|model)",
            r"(?:429|50\d) (?:Client|Server) Error",
            r"ReadTimeoutError.*hugging",
        ),
    ),
    (
        "host_memory",
        (
            r"Out of memory: Killed process",
            r"oom-kill:",
            r"Memory cgroup out of memory",
            r"Not enough host memory",
            r"^MemoryError",
            r"Cannot allocate memory",
            r"\[Errno 12\]",
            r"DefaultCPUAllocator: can't allocate",
        ),
    ),
    ("graph_capture", (r"Capture (?:\w+ )*(?:CUDA |cuda )?graph failed",)),
    ("graph_capture", (r"Fail when using backend: .* for prefill runner",)),
    ("runtime", _OUT_OF_MEMORY),
    (
        "kernel",
        (
            r"no kernel image is available",
            r"driver version is insufficient",
            r"driver on your system is too old",
            r"compiled with an unsupported toolchain",
            r"is not compatible with the current PyTorch",
            r"Unsupported gpu architecture",
            r"No CUDA GPUs are available",
            r"Found no NVIDIA driver",
            r"libcuda\.so\.1: cannot open",
            r"undefined symbol",
            r"cudaErrorInsufficientDriver",
            r"system not yet initialized",
            r"requires? (?:compute capability|SM)",
            r"only support(?:s|ed)? (?:on )?(?:sm|SM)_?\d",
            r"CUDA unknown error",
            r"cuda capability sm_\d+ is not",
            r"named symbol not found",
            r"not supported on SM",
        ),
    ),
    (
        "gpu_fault",
        (
            r"uncorrectable ECC",
            r"illegal memory access",
            r"illegal instruction was encountered",
            r"misaligned address",
            r"unspecified launch failure",
            r"Xid .*\d",
            r"GPU is lost",
            r"fallen off the bus",
            r"device-side assert",
            r"hardware error",
            r"launch timed out",
        ),
    ),
    (
        "port",
        (
            r"address already in use",
            r"Address already in use",
            r"EADDRINUSE",
            r"\[Errno 98\]",
            r"[Pp]ort (?:\d+ )?is already in use",
            r"is used by a process already",
            r"failed to listen on any local network address",
        ),
    ),
    (
        "nccl",
        (
            r"NCCL error",
            r"ncclUnhandled",
            r"ncclSystemError",
            r"ncclInternalError",
            r"ncclRemoteError",
            r"Watchdog caught collective operation timeout",
            r"DistBackendError",
            r"NCCL watchdog",
            r"Timed out initializing process group",
            r"DistNetworkError",
            r"client socket has timed out",
            r"Custom allreduce .*failed",
        ),
    ),
    ("watchdog", (r"[Ww]atchdog timeout", r"Health check failed\. Server couldn't get a response")),
)
CAUSES = _compiled(_CAUSE_ROWS)

# Lines that report how an engine died; used where none reports why
_DEATH_ROWS: tuple[tuple[CauseKind, tuple[str, ...]], ...] = (
    (
        "host_memory",
        (r"died during initialization \(exit code: -9\)", r"Rank \d+ scheduler is dead.*-9"),
    ),
    ("killed", (r"crashed with exit code -(?:9|15)\b", r"exit code:? -(?:9|15)\b")),
    ("killed", (r"SIGTERM received", r"Signal SIGTERM received", r"received signal 15")),
    (
        "gpu_fault",
        (r"exit code -(?:6|7|11)\b", r"Segmentation fault", r"Fatal Python error", r"Bus error"),
    ),
    # An exception that no other row matches is still better than nothing.
    ("unknown", (r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception)\b",)),
    ("unknown", (r"Scheduler hit an exception", r"scheduler died", r"scheduler is dead")),
)
DEATHS = _compiled(_DEATH_ROWS)
