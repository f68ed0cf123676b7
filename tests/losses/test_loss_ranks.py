"""Check that K real gloo ranks compute the same gradients, losses, temperatures and per-row state as one rank."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import oracle
import pytest
import torch
from build import SAMPLES, VARIANTS, build_loss, call, pairs, position, replicated_state
from ranks import run_ranks
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses import autograd_loss
from neuclip_ds.losses.amortization_mlp import AmortizationMlp
from neuclip_ds.section import merge

Variants = Mapping[str, tuple[str, dict[str, Any]]]
ROWS = 24
DIM = 6
STEPS = 4
SUMS_FEATURE_GRADIENTS = ("neuclip_split",)  # alpha_grad=full without replicas sums (B, d) gradients over ranks


def _other_sizes() -> Variants:
    """Return variants with more prototypes or queue entries than pairs, and one with fewer prototypes than ranks."""
    variants: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, section, size in (
        ("neuclip", "npn", "prototypes"),
        ("neuclip_adagrad", "npn", "prototypes"),
        ("neuclip_positive", "npn", "prototypes"),
        ("neuclip_split", "npn", "prototypes"),
        ("neuclip_stop", "npn", "prototypes"),
        ("neuclip_queue", "queue", "size"),
    ):
        method, options = VARIANTS[name]
        variants[f"{name} with more"] = (method, merge(options, {section: {size: ROWS + 7}}))
    variants["neuclip with few"] = ("neuclip", merge(VARIANTS["neuclip"][1], {"npn": {"prototypes": 2}}))
    return variants


OTHER_SIZES = _other_sizes()
ALL = {**VARIANTS, **OTHER_SIZES}
# on four ranks, the prototypes are stored by each rank, by each of two groups of two ranks, or by one group of four
WITH_GROUPS = {name: ALL[name] for name in ("neuclip", "neuclip_no_rho", "neuclip_split", "neuclip_split with more")}


def global_batch(number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    image, text = pairs(ROWS, DIM, seed=number)
    generator = torch.Generator().manual_seed(number // 2)  # samples recur, so their u has earlier values
    index = torch.randperm(SAMPLES, generator=generator)[:ROWS]
    valid = torch.ones(ROWS, dtype=torch.bool)
    if number == STEPS - 2:  # uneven over ranks: the last of three or four ranks has no valid row
        valid[[0, 1, 7, *range(16, ROWS)]] = False
    return image, text, index, valid


def local_rows(communicator: Communicator) -> slice:
    share = ROWS // communicator.world_size
    return slice(communicator.rank * share, (communicator.rank + 1) * share)


def train(communicator: Communicator, chunk: int, variants: Variants) -> dict[str, Any]:
    """Run several steps of every variant on this rank's rows, and return the results by name."""
    local = local_rows(communicator)
    share = ROWS // communicator.world_size
    results: dict[str, Any] = {}
    for name, (method, options) in variants.items():
        options = merge(options, {"temperature": {"rho": 2.0, "lr": 0.05}, "chunk_size": chunk})
        loss_fn = build_loss(method, communicator, DIM, **options)
        steps = []
        for number in range(STEPS):
            image, text, index, valid = (part[local] for part in global_batch(number))
            # every other step is sent piece by piece, in different sizes, as by the towers
            micro_batches = (share // 2, share // 3) if number % 2 else None
            at = position(number, epoch=number // 2)
            steps.append(call(loss_fn, image, text, index, valid, at=at, micro_batches=micro_batches))
        rows: dict[str, Tensor] = {}
        for table_name, table in loss_fn.function.row_tables().items():
            if table.saved:
                for key, values in table.tensors.items():
                    rows[f"{table_name}.{key}"] = values
        results[name] = {
            "steps": steps,
            "rows": rows,
            "state": replicated_state(loss_fn),
            "traffic": dict(communicator.traffic),
        }
        communicator.traffic.clear()
    return results


# with `gather=fits`, only the first of four steps fits the nets
FITS = {"width": 0.5, "gather": "fits", "online_every": 4, "target_every": 1, "ema": 0.5, "positive_weight": 0.3}


def gather_in_fits(communicator: Communicator) -> list[dict[str, Any]]:
    """Run three AmorLIP steps: only the first fits the nets; in the third, the second rank has one valid row."""
    loss_fn = build_loss("amorlip", communicator, DIM, temperature={"initial": 0.1, "lr": 0.0}, amortized=FITS)
    share = ROWS // communicator.world_size
    local = local_rows(communicator)
    results = []
    for number in range(3):
        image, text, index, _ = global_batch(0)
        valid = torch.ones(ROWS, dtype=torch.bool)
        valid[2 * number : 4 * number] = False  # two rows of the first rank in step 1, four in step 2
        if number == 2:
            valid[share + 1 :] = False
        communicator.traffic.clear()
        result = call(loss_fn, image[local], text[local], index[local], valid[local], at=position(number))
        results.append(
            {
                "result": result,
                "target": replicated_state(loss_fn)["normalizer.target"],
                "features_sent": communicator.traffic["features"].bytes_sent,
                "valid": valid[local],
            }
        )
    communicator.traffic.clear()
    return results


def weighted_distances(image: Tensor, text: Tensor, index: Tensor) -> Tensor:
    """Return a loss that is not a sum over rows or pairs, and that depends on the samples."""
    weight = 1 + index.to(image) / SAMPLES
    return (weight.unsqueeze(1) * (image - text)).square().sum().sqrt() * (image @ text.T).logsumexp((0, 1))


def by_autograd(communicator: Communicator) -> list[Any]:
    """Run the steps of a loss from a function, and return their results."""
    loss_fn = build_loss(autograd_loss(weighted_distances), communicator, DIM)
    local = local_rows(communicator)
    results = []
    for number in range(STEPS):
        image, text, index, valid = (part[local] for part in global_batch(number))
        results.append(call(loss_fn, image, text, index, valid, at=position(number)))
    return results


def run_everything(communicator: Communicator, chunk: int, variants: Variants) -> dict[str, Any]:
    return {
        "variants": train(communicator, chunk, variants),
        "fits": gather_in_fits(communicator),
        "autograd": by_autograd(communicator),
    }


@cache
def results_of(world_size: int) -> list[dict[str, Any]]:
    """Start the ranks once for all tests, with smaller blocks than on one rank."""
    if world_size == 1:
        return [run_everything(Communicator(), 1000, ALL)]
    variants: Variants = {2: {}, 3: ALL, 4: WITH_GROUPS}[world_size]
    return run_ranks(world_size, run_everything, 5, variants)


@pytest.mark.parametrize("world_size", [3, 4])
def test_ranks_equal_one(world_size: int) -> None:
    """If m > B, prototypes are drawn from several batches and divided unevenly; if m < K, a rank has no prototypes."""
    ranks = [rank["variants"] for rank in results_of(world_size)]
    one = results_of(1)[0]["variants"]
    for name, results in ranks[0].items():
        for number, expected in enumerate(one[name]["steps"]):
            assert_step_equals([rank[name]["steps"][number] for rank in ranks], expected, f"{name} step {number}")
        for key, value in results["state"].items():
            assert all(torch.equal(rank[name]["state"][key], value) for rank in ranks), f"{name} {key}: the same bits"
        for key, expected_rows in one[name]["rows"].items():
            rows = torch.cat([rank[name]["rows"][key] for rank in ranks if key in rank[name]["rows"]])
            torch.testing.assert_close(rows, expected_rows, rtol=1e-9, atol=1e-12, msg=f"{name} {key}")


def assert_step_equals(ranks: list[Any], expected: Any, where: str) -> None:
    """Check that the ranks' results of one step, taken together, equal those of one rank."""
    image = torch.cat([rank.image for rank in ranks])
    text = torch.cat([rank.text for rank in ranks])
    torch.testing.assert_close(image, expected.image, rtol=1e-9, atol=1e-12, msg=where)
    torch.testing.assert_close(text, expected.text, rtol=1e-9, atol=1e-12, msg=where)
    assert len({float(rank.loss) for rank in ranks}) == 1, f"{where}: the ranks' losses are the same bits"
    torch.testing.assert_close(ranks[0].loss, expected.loss, rtol=1e-10, atol=0)
    for name, value in expected.metrics.items():
        assert len({float(rank.metrics[name]) for rank in ranks}) == 1, f"{where}: {name} is the same bits on all ranks"
        limit = 1e-12 if name == "tau" else 1e-8
        torch.testing.assert_close(ranks[0].metrics[name], value, rtol=limit, atol=1e-12, msg=f"{where} {name}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_loss_by_autograd_is_exact_on_ranks(world_size: int) -> None:
    one = results_of(1)[0]["autograd"]
    for number, expected in enumerate(one):
        ranks = [rank["autograd"][number] for rank in results_of(world_size)]
        assert_step_equals(ranks, expected, f"step {number}")


def test_ranks_send_features_once_and_otherwise_only_scalars_and_network_gradients() -> None:
    """The scalars are O(B). Some variants, `SUMS_FEATURE_GRADIENTS`, also sum the gradients of features over ranks."""
    world_size = 3
    results = results_of(world_size)[0]["variants"]
    share = ROWS // world_size
    itemsize = 8
    for name in VARIANTS:
        traffic = results[name]["traffic"]
        assert traffic["features"].bytes_sent == (world_size - 1) * STEPS * share * (8 + 2 * DIM * itemsize)
        assert traffic["scalars"].calls == STEPS
        other_bytes = 0
        for purpose, counted in traffic.items():
            if purpose not in ("features", "network gradients"):
                other_bytes += counted.bytes_sent
        if name not in SUMS_FEATURE_GRADIENTS:
            updates = VARIANTS[name][1].get("npn", {}).get("inner_steps", 0)
            assert other_bytes <= (world_size - 1) * STEPS * ROWS * itemsize * 2 * (updates + 4)
    assert "network gradients" not in results["amorlip"]["traffic"], (
        "each rank fits the nets to all rows, whose features are fewer bytes"
    )
    calls = results["amorlip_seldom"]["traffic"]["network gradients"].calls
    assert calls == 2, "one update of a fit to its own rows; with T_online = 2: the first of each epoch"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_with_gather_fits_steps_without_a_fit_contrast_a_ranks_own_rows(world_size: int) -> None:
    """Compare with autograd of the loss over each rank's rows, and check the bytes that steps send for features."""
    ranks = [rank["fits"] for rank in results_of(world_size)]
    share = ROWS // world_size
    mlp = AmortizationMlp(DIM, DIM // 2)
    tau = torch.tensor(0.1, dtype=torch.float64)
    image, text, *_ = global_batch(0)
    total = sum(int(rank[1]["valid"].sum()) for rank in ranks)
    losses = []
    for number, rank in enumerate(ranks):
        valid = rank[1]["valid"]
        result = rank[1]["result"]
        assert torch.equal(rank[1]["target"], ranks[0][1]["target"])
        local_samples = torch.arange(share)[valid] + number * share
        local_image = image[local_samples].requires_grad_()
        local_text = text[local_samples].requires_grad_()
        log_lambda = mlp(rank[1]["target"], torch.stack([local_image.detach(), local_text.detach()]))
        rows = len(local_samples)
        positive_weight = 0.3 * (rows - 1) / (total - 1)  # c/(B-1), as in the global batch
        loss = oracle.amorlip(local_image, local_text, tau, log_lambda, positive_weight, 0.0) * (rows / total)
        image_gradient, text_gradient = torch.autograd.grad(loss, (local_image, local_text))
        torch.testing.assert_close(result.image[valid], image_gradient, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(result.text[valid], text_gradient, rtol=1e-9, atol=1e-12)
        assert not result.image[~valid].any()
        assert not result.text[~valid].any()
        losses.append(loss.detach())
        assert float(result.loss) == float(ranks[0][1]["result"].loss)
        if world_size > 1:
            sent = [step["features_sent"] for step in rank]
            count = 8 * (world_size - 1)  # bytes
            gathered = count * share * (1 + 2 * DIM)
            assert sent == [gathered, count, count + gathered], (
                "one count of rows; all features where a rank lacks a negative"
            )
    torch.testing.assert_close(ranks[0][1]["result"].loss, torch.stack(losses).sum(), rtol=1e-9, atol=0)
    assert torch.isfinite(ranks[-1][2]["result"].image).all()
