"""Health of NeuCLIP's network: whether it still predicts the normaliser."""

import logging
import math

from torch import Tensor

from neuclip_ds.objectives.base import Step

log = logging.getLogger(__name__)

_LOST = 2.0  # mean of (eps + g)/(eps + ghat), or its inverse; 1 at the optimum
_FOUND = 1.5  # well inside, so that a mean at the limit does not log again and again


class NpnHealth:
    """Logs once when the prediction loses the normaliser, and again when it has recovered, as steps with logs show."""

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self._healthy = True

    def watch(self, ratio: Tensor, step: Step) -> dict[str, Tensor]:
        """Return metrics of the (2, B) ratios (eps + g)/(eps + ghat); log a change of health in a step that logs."""
        metrics = {"npn_ratio_mean": ratio.mean(), "npn_ratio_max": ratio.max()}
        if step.logs:
            self._report(float(metrics["npn_ratio_mean"]), step)
        return metrics

    def _report(self, mean: float, step: Step) -> None:
        off = max(mean, 1 / mean) if mean > 0 else float("inf")
        if math.isnan(mean):
            pass  # the step is skipped, for another reason
        elif self._healthy and not off <= _LOST:
            log.warning(
                "step %d: the NPN has lost the normaliser: the mean of (eps + g)/(eps + ghat) is %.3g, outside "
                "[0.5, 2]; if it stays there, lower objective.npn.lr (now %g) or objective.npn.restart_every",
                step.number, mean, self._lr,
            )  # fmt: skip
            self._healthy = False
        elif not self._healthy and off <= _FOUND:
            log.info("step %d: the NPN follows the batch normaliser again (mean ratio %.3g)", step.number, mean)
            self._healthy = True
