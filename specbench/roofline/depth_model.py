"""Step times for a throttle from the fitted step model, where nothing was measured: predictions and exported tables.

python -c "from specbench.roofline.depth_model import ModelSteps"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.roofline.acceptance import AcceptanceCurve
from specbench.roofline.draft_cost import DraftShape
from specbench.roofline.step_model import StepModel
from specbench.roofline.throttle import CachedSteps, Throttle, depth_table


@dataclass(frozen=True)
class ModelSteps:
    """A StepModel's whole step with chains of `draft`: what `Throttle` asks for."""

    model: StepModel
    draft: DraftShape | None

    def step_times(self, batch: int, context_len: int, depth: int) -> float:
        return self.model.step(batch, context_len, depth, self.draft).total_s


def model_throttle(model: StepModel, draft: DraftShape | None, max_depth: int, prior: AcceptanceCurve) -> Throttle:
    """A throttle that chooses by the model, beginning with the curve `prior`."""
    return Throttle(CachedSteps(ModelSteps(model, draft)), max_depth, prior=prior.rates(max_depth))


def model_table(
    model: StepModel,
    draft: DraftShape | None,
    acceptance: AcceptanceCurve,
    context_len: int,
    batches: Sequence[int],
    max_depth: int,
) -> dict[int, int]:
    """Batch -> best depth by the model for an acceptance that is known; `depth_export.export` writes it for engines."""
    tokens = [acceptance.expected_tokens(depth) for depth in range(max_depth + 1)]
    return depth_table(ModelSteps(model, draft), tokens, context_len, batches)
