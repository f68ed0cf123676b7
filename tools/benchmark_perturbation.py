"""For developers of neuclip_ds: how far an objective carries a small perturbation of its features.

Two objectives see the same batches of clustered features, for one of them with noise of 1e-6 of a feature's norm, in
float64 and at a constant temperature. The growth is the relative distance of their feature gradients in the last step,
divided by that of the features. Rounding grows alike: 1e5 leaves of float32's seven digits two.

Example:
    python tools/benchmark_perturbation.py --tau 0.05 0.02 0.01 --steps 12
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.objectives import build_objective
from neuclip_ds.objectives.base import Context, Step
from neuclip_ds.objectives.gather import Features

ROWS, DIM, CLUSTERS, PROTOTYPES = 256, 64, 32, 512
_NOISE = 1e-6
VARIANTS: dict[str, dict[str, Any]] = {
    "openclip": {"method": "openclip"},
    "fastclip_v3": {"method": "fastclip_v3"},
    "neuclip_queue": {"method": "neuclip_queue", "queue": {"prototypes": PROTOTYPES}},
    **{
        f"neuclip, T_u = {updates}, rate {lr}": {
            "method": "neuclip",
            "npn": {"prototypes": PROTOTYPES, "updates": updates, "lr": lr},
        }
        for updates, lr in ((5, 0.05), (5, 1.0), (10, 1.0))
    },
}


def clustered(number: int) -> tuple[Tensor, Tensor]:
    """Return the (rows, d) images and texts of a batch: pairs around common places, a partner at about 0.8."""
    generator = torch.Generator().manual_seed(number)
    places = torch.randn(CLUSTERS, DIM, generator=torch.Generator().manual_seed(10**6), dtype=torch.float64)
    pair, image, text = torch.randn(3, ROWS, DIM, generator=generator, dtype=torch.float64)
    centre = places[torch.randint(CLUSTERS, (ROWS,), generator=generator)] + 0.5 * pair
    return normalize(centre + 0.5 * image, dim=1), normalize(centre + 0.5 * text, dim=1)


def gradients(options: dict[str, Any], tau: float, steps: int, noise: float) -> Tensor:
    """Return the (2 rows, d) feature gradient of the last of some steps."""
    config = Config.model_validate({"objective": {**options, "temperature": {"initial": tau, "lr": 0.0}}})
    context = Context(DIM, steps * ROWS, Communicator(), torch.float64)
    objective = build_objective(config, context, comm_dtype=torch.float64)
    generator = torch.Generator().manual_seed(10**6 + 1)
    valid = torch.ones(ROWS, dtype=torch.bool)
    for number in range(steps):
        features = torch.stack(clustered(number))
        moved = features + noise * normalize(
            torch.randn(features.shape, generator=generator, dtype=torch.float64), dim=2
        )
        image, text = normalize(moved, dim=2)
        index = torch.arange(ROWS) + number * ROWS
        found = objective(Features(image, text, index, valid), Step(number, 0, 1e-3, 1e-3))
    return torch.cat([found.image, found.text])


def growth(options: dict[str, Any], tau: float, steps: int) -> float:
    """Return the distance of the last step's gradients relative to that of the features."""
    plain, moved = (gradients(options, tau, steps, noise) for noise in (0.0, _NOISE))
    return float((moved - plain).norm() / plain.norm()) / _NOISE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tau", type=float, nargs="+", default=[0.05, 0.02, 0.01], help="default 0.05 0.02 0.01")
    parser.add_argument("--steps", type=int, default=12, help="default 12")
    options = parser.parse_args()
    print(f"| objective | {' | '.join(f'tau = {tau}' for tau in options.tau)} |\n{'|---' * (1 + len(options.tau))}|")
    for name, variant in VARIANTS.items():
        found = [growth(variant, tau, options.steps) for tau in options.tau]
        print(f"| {name} | {' | '.join(f'{value:.2g}' for value in found)} |", flush=True)


if __name__ == "__main__":
    main()
