"""Scoring functions of routers: they turn a logit into the score of an expert."""

from __future__ import annotations

from enum import IntEnum


class ScoringFunc(IntEnum):
    """Scoring function of a router; `str()` gives the lower-case name."""

    SIGMOID = 0
    SQRTSOFTPLUS = 1
    SOFTMAX = 2
    IDENTITY = 3

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def from_str(cls, label: str) -> ScoringFunc:
        """The member named `label`, in any case.

        Raises:
            ValueError: `label` names no scoring function.
        """
        try:
            return cls[label.upper()]
        except KeyError:
            names = ', '.join(str(member) for member in cls)
            raise ValueError(f'scoring function must be one of {names}, got {label!r}') from None


#: Names of all scoring functions.
SCORINGS = tuple(str(member) for member in ScoringFunc)
