"""What all sections of the configuration share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Recompute = Literal["none", "selective", "full"]
KlEstimator = Literal["k1", "k2", "k3", "low_var_kl", "abs", "mse"]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are checked on assignment, nan and inf are no numbers."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False, protected_namespaces=())
