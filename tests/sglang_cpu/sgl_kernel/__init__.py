"""SGLang's compiled CPU kernels, as far as the tiny models of these tests call them, in torch.

The compiled package is not on the package index. Here are the kernels around the request table and
those of speculation over a chain of drafts; attention and linear attention have a module each. Any
other kernel can be imported, and says its name when it is called.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from . import ops as ops  # puts the operators in their place

__version__ = "0.4.10"


# -- the table of cache slots


def assign_req_to_token_pool_cpu(
    requests: Any, table: Any, starts: Any, ends: Any, slots: Any, _width: int
) -> None:
    """Write each request's new cache slots into its row of the table, one after the other."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = max(0, end - start)
        table[request, start : start + count] = slots[taken : taken + count].to(table.dtype)
        taken += count


def assign_extend_cache_locs_cpu(
    requests: Any, table: Any, starts: Any, ends: Any, slots: Any, _width: int
) -> None:
    """Read each request's cache slots from its row of the table, one after the other."""
    rows = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    found = torch.cat([table[request, start:end] for request, start, end in rows])
    slots[: len(found)] = found.to(slots.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    requests: Any, table: Any, lengths: Any, slots: Any, width: int, topk: int, num_columns: int
) -> None:
    """The slots behind what a request holds, for its drafts."""
    ends = lengths + topk * num_columns
    assign_extend_cache_locs_cpu(requests, table, lengths, ends, slots, width)


def build_draft_decode_metadata_cpu(
    table: Any, requests: Any, _lengths: Any, topk: int, _num_steps: int, _width: int
) -> Any:
    """The rows of the table that drafting reads; a chain's slots stand in them already."""
    _chain_only(topk)
    return table[requests.long()]


def copy_all_layer_kv_cache_cpu(addresses: Any, row_bytes: Any, targets: Any, sources: Any) -> None:
    """Move cache rows within each layer's buffer, of which only the address is told."""
    for address, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in sources.tolist()]
        for slot, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)


# -- drafts in a chain, and what the model keeps of them


def build_tree_kernel_efficient_cpu(
    _parents: Any, _chosen: Any, lengths: Any, mask: Any, positions: Any, order: Any,
    following: Any, beside: Any, topk: int, _depth: int, num_drafts: int, mask_mode: int,
) -> None:  # fmt: skip
    """Positions, order and visibility of each request's drafts: each sees those before it."""
    _chain_only(topk)
    if int(mask_mode) != 1:
        raise ValueError(f"mask mode {mask_mode}: expected 1, drafts masked among themselves alone")
    steps, num_requests = torch.arange(num_drafts), len(lengths)
    positions.view(num_requests, -1).copy_(lengths[:, None] + steps)
    order.view(-1).copy_(torch.arange(num_requests * num_drafts))
    following.copy_(torch.cat([steps[1:], torch.tensor([-1])]).expand_as(following))
    beside.fill_(-1)
    visible = torch.ones(num_drafts, num_drafts).tril().bool().expand(num_requests, -1, -1)
    mask.view(-1)[: visible.numel()] = visible.reshape(-1).to(mask.dtype)


def verify_tree_greedy_cpu(
    *, predicts: Any, accept_index: Any, accept_token_num: Any, candidates: Any,
    target_predict: Any, **_tree: Any,
) -> None:  # fmt: skip
    """Keep drafts as long as each is what the model says itself, and one token of its own."""
    num_requests, num_drafts = candidates.shape
    own = target_predict.view(num_requests, num_drafts)
    agrees = (candidates[:, 1:] == own[:, :-1]).long()
    kept = agrees.cumprod(1).sum(1)
    accept_token_num.copy_(kept)
    places = torch.arange(num_requests * num_drafts).view(num_requests, num_drafts)
    is_kept = torch.arange(num_drafts) <= kept[:, None]
    accept_index.copy_(torch.where(is_kept, places, -1)[:, : accept_index.shape[1]])
    predicts[places[is_kept]] = own[is_kept].to(predicts.dtype)


def fill_bonus_tokens_cpu(kept: Any, counts: Any, bonus: Any, width: int) -> None:
    """The last kept token of each request, from which drafting goes on."""
    rows = kept.reshape(-1, width)
    bonus.copy_(rows.gather(1, counts.long()[:, None] - 1)[:, 0])


def fill_accept_out_cache_loc_cpu(kept_index: Any, slots: Any, kept_slots: Any) -> None:
    """The cache slots of the tokens that are kept, without gaps."""
    found = slots[kept_index[kept_index >= 0].long()]
    kept_slots[: len(found)] = found.to(kept_slots.dtype)


def rotate_input_ids_cpu(
    ids: Any, starts: Any, lengths: Any, next_ids: Any, places: Any = None
) -> None:
    """The draft head reads the token behind each: shift by one, the newest at the end."""
    for n, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if not length:
            continue
        ids[start : start + length - 1] = ids[start + 1 : start + length].clone()
        ids[start + length - 1 if places is None else int(places[n])] = next_ids.view(-1)[n]


def _chain_only(topk: int) -> None:
    if topk != 1:
        raise ValueError(f"--speculative-eagle-topk {topk}: expected 1, drafts in a chain")


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: object, **__: object) -> None:
        """SGLang imports names of kernels that a CPU never runs; whatever runs one hears so."""
        raise RuntimeError(f"no kernel {name} on the CPU")

    return absent
