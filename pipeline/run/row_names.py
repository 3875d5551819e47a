"""Row numbers of a session, and the names under which rows outlive it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.dataset.frozen import FrozenPrompts, frozen_prompts
from pipeline.store.folder import Folder
from pipeline.store.journal import RowName

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNames:
    """Translates by the frozen prompts, which are read when they are needed."""

    folder: Folder
    frozen_name: str
    samples_per_prompt: int

    def names_of(self, rows: Sequence[int]) -> list[RowName]:
        frozen, samples = self._frozen(), self.samples_per_prompt
        return [(frozen.prompt(row // samples).row_id, row % samples) for row in rows]

    def by_number(self, values: Mapping[RowName, Value]) -> dict[int, Value]:
        """Return the values by row number; rows that the session does not have are left out."""
        if not values:
            return {}
        samples = self.samples_per_prompt
        numbers = dict(self._frozen().numbers_of({row_id for row_id, _ in values}))
        return {
            numbers[row_id] * samples + sample: value
            for (row_id, sample), value in values.items()
            if row_id in numbers and sample < samples
        }

    def _frozen(self) -> FrozenPrompts:
        frozen = frozen_prompts(self.folder, self.frozen_name)
        assert frozen is not None
        return frozen
