"""Token ids of turns, and the first parts of turns whose engine was stopped on purpose."""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

# The class takes no argument at run time before Python 3.12.
if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A place in a turn from which another start of an engine generated on."""

    at_token: int
    """Completion tokens that the turn had by then."""
    worker_id: str
    """Worker that generated what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialTurn:
    """The first part of a turn, as far as it was generated when its request was aborted."""

    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    reasoning_tokens: int | None
    """Completion tokens up to the end of the thinking; None if the engine does not report them."""
    is_thinking: bool
    """True while the closing tag of the thinking is not among the completion tokens."""
    duration_s: float
    continued: tuple[Continuation, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.completion_token_ids)
