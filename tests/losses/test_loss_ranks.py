"""Check that K real gloo ranks compute the same gradients, losses, temperatures and per-row state as one rank."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

import oracle
import pytest
import torch
from build import SAMPLES, VARIANTS, batch, objective, pairs, step
from neuclip_ds.objectives.normalizers.amortization_mlp import AmortizationMlp
from ranks import run_ranks

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.losses.methods import METHODS
from neuclip_ds.section import merge

Variants = Mapping[str, tuple[str, dict[str, Any]]]
ROWS, DIM, STEPS = 24, 6, 5
MORE_PROTOTYPES = {
    name: (method, merge(options, {section: {size: ROWS + 7}}))
    for name, (method, options) in VARIANTS.items()
    for section, size in (("npn", "prototypes"), ("queue", "size"))
    if section in METHODS[method].sections and options.get(section, {}).get("network") != "mlp"
}
OTHER_SIZES = {**MORE_PROTOTYPES, "neuclip_few": ("neuclip", merge(VARIANTS["neuclip"][1], {"npn": {"prototypes": 3}}))}
SUM_PULLS = ("neuclip_split",)  # alpha_grad=full without replicas: (B, d) prototype gradients are summed over ranks


def global_batch(number: int) -> tuple[torch.Tensor, ...]:
    image, text = pairs(ROWS, DIM, seed=number)
    generator = torch.Generator().manual_seed(number // 2)  # samples recur, so their u has earlier values
    index = torch.randperm(SAMPLES, generator=generator)[:ROWS]
    valid = torch.ones(ROWS, dtype=torch.bool)
    if number == STEPS - 2:  # uneven over ranks: the last of four ranks has no valid row
        valid[[0, 1, 7, *range(18, 24)]] = False
    return image, text, index, valid


def train(communicator: Communicator, chunk: int, variants: Variants = VARIANTS) -> dict[str, Any]:
    """Run several steps of every method on this rank's rows, and return the results by name."""
    share = ROWS // communicator.world_size
    mine = slice(communicator.rank * share, (communicator.rank + 1) * share)
    results: dict[str, Any] = {}
    for name, (method, options) in variants.items():
        options = merge(options, {"temperature": {"rho": 2.0, "lr": 0.05}, "chunk_size": chunk})
        built = objective(method, communicator, DIM, **options)
        steps = []
        for number in range(STEPS):
            image, text, index, valid = (part[mine] for part in global_batch(number))
            features = batch(image.to(communicator.device), text.to(communicator.device), index, valid)
            if number % 2:  # as from the towers: piece by piece, in different sizes
                gather = built.begin_gather(features.index, features.valid)
                for piece in features.text.split(share // 2):
                    gather.add_text(piece)
                for piece in features.image.split(share // 3):
                    gather.add_image(piece)
                features = dataclasses.replace(features, gather=gather)
            found = built(features, step(number, epoch=number // 2))
            steps.append((found.image, found.text, found.loss, float(found.metrics["tau"])))
        saved = {table: rows.tensors for table, rows in built.row_tables().items() if rows.saved}
        tables = {f"{table}.{key}": t for table, rows in saved.items() for key, t in rows.items()}
        state = built.replicated_state()
        results[name] = {"steps": steps, "rows": tables, "state": state, "traffic": dict(communicator.traffic)}
        communicator.traffic.clear()
    return results


@cache
def trained(world_size: int) -> list[dict[str, Any]]:
    return run_ranks(world_size, train, 5)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_equal_one(world_size: int) -> None:
    check_ranks(trained(world_size))


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_more_prototypes_than_pairs_and_fewer_than_ranks(world_size: int) -> None:
    """If m > B, prototypes are drawn from several batches and divided unevenly; if m < K, a rank has no prototypes."""
    assert {"neuclip", "neuclip_stop", "neuclip_positive", "neuclip_no_rho", "neuclip_queue"} <= MORE_PROTOTYPES.keys()
    check_ranks(run_ranks(world_size, train, 5, OTHER_SIZES), OTHER_SIZES)


def check_ranks(ranks: list[dict[str, Any]], variants: Variants = VARIANTS) -> None:
    """Check that the ranks' combined results equal one CPU rank's, and that all ranks' replicated state is the same."""
    one = train(Communicator(), 1000, variants)
    for name in variants:
        for number in range(STEPS):
            found = [rank[name]["steps"][number] for rank in ranks]
            wanted = one[name]["steps"][number]
            for part in (0, 1):
                whole = torch.cat([rank[part] for rank in found])
                torch.testing.assert_close(whole, wanted[part], rtol=1e-9, atol=1e-12, msg=f"{name} step {number}")
            assert len({rank[3] for rank in found}) == 1, "the ranks' temperatures are the same bits"
            assert found[0][3] == pytest.approx(wanted[3], rel=1e-12)
            torch.testing.assert_close(found[0][2], wanted[2], rtol=1e-10, atol=0)
        for key, value in ranks[0][name]["state"].items():
            assert all(torch.equal(rank[name]["state"][key], value) for rank in ranks), f"{name} {key}: the same bits"
        for key, rows in one[name]["rows"].items():
            whole = torch.cat([rank[name]["rows"][key] for rank in ranks if key in rank[name]["rows"]])
            torch.testing.assert_close(whole, rows, rtol=1e-9, atol=1e-12, msg=f"{name} {key}")


def test_traffic_is_counted() -> None:
    """Check that ranks send features once and otherwise only O(B) scalars and nets' gradients, except in SUM_PULLS."""
    ranks = trained(2)
    share, item, apart = ROWS // 2, 8, ("features", "network gradients")
    for name in VARIANTS:
        traffic = ranks[0][name]["traffic"]
        assert traffic["features"].bytes_sent == STEPS * share * (8 + 2 * DIM * item)
        assert traffic["scalars"].calls == STEPS
        others = sum(counted.bytes_sent for purpose, counted in traffic.items() if purpose not in apart)
        if name not in SUM_PULLS:
            updates = VARIANTS[name][1].get("npn", {}).get("inner_steps", 0)
            assert others <= STEPS * ROWS * item * 2 * (updates + 4)
    assert "network gradients" not in ranks[0]["amorlip"]["traffic"], (
        "each rank fits the nets to all rows, whose features are fewer bytes"
    )
    calls = ranks[0]["amorlip_seldom"]["traffic"]["network gradients"].calls
    assert calls == 3, "one update of a fit to its own rows; with T_online = 2: the first of each epoch"


LOCAL = {"width": 0.5, "gather": "fits", "online_every": 4, "target_every": 1, "ema": 0.5, "positive_weight": 0.3}


def gather_in_fits(communicator: Communicator) -> list[dict[str, Any]]:
    """Run three AmorLIP steps: only the first fits the nets; in the third, the second rank has one valid row."""
    options = {"temperature": {"initial": 0.1, "lr": 0.0}, "amortized": LOCAL}
    built = objective("amorlip", communicator, DIM, **options)
    share, found = ROWS // communicator.world_size, []
    mine = slice(communicator.rank * share, (communicator.rank + 1) * share)
    for number in range(3):
        image, text, index, _ = global_batch(0)
        valid = torch.ones(ROWS, dtype=torch.bool)
        valid[2 * number : 4 * number] = False  # two rows of the first rank in step 1, four in step 2
        if number == 2:
            valid[share + 1 :] = False
        assert built.begin_gather(index[mine], valid[mine]) is None
        communicator.traffic.clear()
        result = built(batch(*(x[mine] for x in (image, text, index, valid))), step(number))
        traffic = {purpose: counted.bytes_sent for purpose, counted in communicator.traffic.items()}
        target = built.replicated_state()["normalizer.target"].clone()
        parts = {"image": result.image, "text": result.text, "loss": result.loss, "metrics": result.metrics}
        found.append({**parts, "target": target, "traffic": traffic, "valid": valid[mine]})
    return found


def test_steps_without_a_fit_contrast_a_ranks_own_rows() -> None:
    """Compare with autograd of the loss over each rank's rows, and check the bytes that steps send for features."""
    ranks = run_ranks(2, gather_in_fits)
    share, mlp = ROWS // 2, AmortizationMlp(DIM, DIM // 2)
    image, text, *_ = global_batch(0)
    total = sum(int(rank[1]["valid"].sum()) for rank in ranks)
    losses, tau = [], torch.tensor(0.1, dtype=torch.float64)
    for number, rank in enumerate(ranks):
        found = rank[1]
        assert torch.equal(found["target"], ranks[0][1]["target"])
        kept = torch.arange(share)[found["valid"]] + number * share
        own = [x[kept].requires_grad_() for x in (image, text)]
        log_lambda = mlp(found["target"], torch.stack([x.detach() for x in own]))
        positive_weight = 0.3 * (len(kept) - 1) / (total - 1)  # c/(B-1), as in the global batch
        loss = oracle.amorlip(*own, tau, log_lambda, positive_weight, 0.0) * (len(kept) / total)
        for part, wanted in zip(("image", "text"), torch.autograd.grad(loss, own), strict=True):
            torch.testing.assert_close(found[part][found["valid"]], wanted, rtol=1e-9, atol=1e-12)
            assert not found[part][~found["valid"]].any()
        losses.append(loss.detach())
        assert float(found["loss"]) == float(ranks[0][1]["loss"])
        sent = [step["traffic"]["features"] for step in rank]
        gathered = share * (8 + 2 * DIM * 8)
        assert sent == [gathered, 8, 8 + gathered], "one count of rows; all features where a rank lacks a negative"
    torch.testing.assert_close(ranks[0][1]["loss"], torch.stack(losses).sum(), rtol=1e-9, atol=0)
    assert torch.isfinite(ranks[1][2]["image"]).all()
