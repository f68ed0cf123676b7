"""Distillation adds open_clip's soft targets to every loss, exactly, for all of the features and temperatures."""

import math
from typing import Any

import pytest
import torch
from build import (
    NO_MOMENTUM,
    VARIANTS,
    Result,
    build_loss,
    call,
    columns,
    pairs,
    position,
    relative_error,
    scalar_gradients,
)
from ranks import run_ranks
from torch import Tensor

from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss
from neuclip_ds.section import merge

ROWS = 18
DIM = 6
TAU = 0.06
WEIGHT = 0.7
CONTRASTIVE_WEIGHT = 0.4
TEMPERATURES = [0.05, 0.02]
EXACT = 1e-9
DISTILL = {"weight": WEIGHT, "contrastive_weight": CONTRASTIVE_WEIGHT, "temperature": TEMPERATURES}
TEACHERS = [pairs(ROWS, 9, seed=80), pairs(ROWS, 4, seed=81)]
# one variant of each kind of loss
NAMES = ("openclip", "siglip", "sogclr", "isogclr", "fastclip_v0", "fastclip_v3", "tuneclip", "amorlip", "neuclip")
NAMES += ("neuclip_queue",)
INVALID = [0, 5, 6, *range(14, ROWS)]


def soft_targets(image: Tensor, text: Tensor, tau: Tensor, valid: Tensor) -> Tensor:
    """Return the distillation of a batch with the mean of the teachers' softmaxes; tau is 0-dim or (2, B)."""
    taus = tau.expand(2, len(image)).unsqueeze(2)
    loss = torch.zeros((), dtype=torch.float64)
    for direction, (anchors, partners) in enumerate(((image, text), (text, image))):
        target = torch.zeros(len(image), len(image), dtype=torch.float64)
        for teacher, temperature in zip(TEACHERS, TEMPERATURES, strict=True):
            scores = teacher[direction][valid] @ teacher[1 - direction][valid].T
            target += (scores / temperature).softmax(1) / len(TEACHERS)
        log_probability = (anchors @ partners.T / taus[direction]).log_softmax(1)
        loss = loss - (target * log_probability).sum(1).mean() / 2
    return loss


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the images, texts and valid rows of a step; the second has invalid rows."""
    image, text = pairs(ROWS, DIM, seed=number)
    valid = torch.ones(ROWS, dtype=torch.bool)
    if number == 1:
        valid[INVALID] = False
    return image, text, valid


def steps(communicator: Communicator, chunk: int | None, distills: bool) -> dict[str, list[dict[str, Tensor]]]:
    """Run two steps of each loss with this rank's rows, with distillation or without, and return their results."""
    share = ROWS // communicator.world_size
    local = slice(communicator.rank * share, (communicator.rank + 1) * share)
    results: dict[str, list[dict[str, Tensor]]] = {}
    for name in NAMES:
        method, options = VARIANTS[name]
        distillation: dict[str, Any] = {"distill": DISTILL} if distills else {}
        temperature = {"initial": TAU, "lr": 0.0}
        options = merge(options, {"temperature": temperature, "chunk_size": chunk, **distillation})
        loss_fn = build_loss(method, communicator, DIM, betas=NO_MOMENTUM, **options)
        results[name] = []
        for number in range(2):
            image, text, valid = (rows[local] for rows in batch(number))
            teachers = [(of_images[local], of_texts[local]) for of_images, of_texts in TEACHERS]
            result = call(
                loss_fn,
                image,
                text,
                torch.arange(ROWS)[local],
                valid,
                at=position(number),
                micro_batches=(4, 5) if number else None,
                teacher=teachers if distills else None,
            )
            results[name].append(values_of(result, loss_fn, communicator, batch(number)[2]))
    return results


def values_of(result: Result, loss_fn: ContrastiveLoss, communicator: Communicator, valid: Tensor) -> dict[str, Tensor]:
    """Return the loss and all gradients; on several ranks, gradients for individual temperatures are omitted."""
    values = {"loss": result.loss, "image": result.image, "text": result.text, **scalar_gradients(loss_fn)}
    tables = loss_fn.function.row_tables()
    if "temperatures" in tables and communicator.world_size == 1:
        rows = columns(tables["temperatures"])
        values["taus"] = torch.stack([rows["moment_image"], rows["moment_text"]])[:, :ROWS][:, valid]
    return values


def assert_adds_soft_targets(
    plain: list[dict[str, list[dict[str, Tensor]]]], distilled: list[dict[str, list[dict[str, Tensor]]]]
) -> None:
    """Check the results of all ranks: the weighted sum of the plain loss and the distillation of the whole batch."""
    for name in NAMES:
        for number in range(2):
            image, text, valid = batch(number)
            image = image[valid].requires_grad_()
            text = text[valid].requires_grad_()
            individual = "taus" in plain[0][name][number]
            theta = torch.full((2, len(image)) if individual else (), -math.log(TAU), dtype=torch.float64)
            loss = soft_targets(image, text, (-theta.requires_grad_()).exp(), valid)
            grad_image, grad_text, grad_theta = torch.autograd.grad(loss, (image, text, theta))
            added = {"loss": loss.detach(), "image": grad_image, "text": grad_text, "theta": grad_theta}
            added["taus"] = -grad_theta * len(image) / TAU
            added["bias"] = torch.zeros(())
            for key, before in plain[0][name][number].items():
                after = distilled[0][name][number][key]
                if key in ("image", "text"):
                    before = torch.cat([rank[name][number][key] for rank in plain])[valid]
                    after = torch.cat([rank[name][number][key] for rank in distilled])[valid]
                expected = CONTRASTIVE_WEIGHT * before + WEIGHT * added[key]
                assert relative_error(after, expected) < EXACT, (name, number, key)


@pytest.mark.parametrize("chunk", [None, 5])
def test_every_loss_adds_soft_targets(chunk: int | None) -> None:
    assert_adds_soft_targets([steps(Communicator(), chunk, False)], [steps(Communicator(), chunk, True)])


def both(communicator: Communicator) -> list[dict[str, list[dict[str, Tensor]]]]:
    return [steps(communicator, 5, False), steps(communicator, 5, True)]


def test_every_loss_adds_soft_targets_on_three_ranks() -> None:
    ranks = run_ranks(3, both)
    assert_adds_soft_targets([plain for plain, _ in ranks], [distilled for _, distilled in ranks])


def local_steps(communicator: Communicator) -> list[tuple[Tensor, Tensor]]:
    """Run a step that gathers, one that contrasts local rows, and one in which a rank has a single valid row.

    Return the images' gradient with and without distillation in each step.
    """
    share = ROWS // communicator.world_size
    local = slice(communicator.rank * share, (communicator.rank + 1) * share)
    nets = {"width": 0.5, "gather": "fits", "online_every": 4, "target_every": 1}
    results: list[list[Tensor]] = []
    for distills in (False, True):
        loss_fn = build_loss(
            "amorlip",
            communicator,
            DIM,
            amortized=nets,
            temperature={"initial": TAU, "lr": 0.0},
            distill={"temperature": TEMPERATURES},
        )
        results.append([])
        for number in range(3):
            valid = torch.ones(share, dtype=torch.bool)
            if number == 2 and communicator.rank:
                valid[1:] = False
            image, text = (x[local] for x in pairs(ROWS, DIM))
            teachers = [(of_images[local], of_texts[local]) for of_images, of_texts in TEACHERS]
            result = call(
                loss_fn, image, text, valid=valid, at=position(number), teacher=teachers if distills else None
            )
            results[-1].append(result.image)
    return list(zip(*results, strict=True))


def test_a_step_that_gathers_no_features_distills_local_rows() -> None:
    ranks = run_ranks(2, local_steps)
    share = ROWS // 2
    image, text = (x.requires_grad_() for x in pairs(ROWS, DIM))
    tau = torch.tensor(TAU, dtype=torch.float64)
    everything = torch.ones(ROWS, dtype=torch.bool)
    first_rank = torch.arange(ROWS) < share
    all_but_some = torch.arange(ROWS) <= share
    (whole,) = torch.autograd.grad(soft_targets(image, text, tau, everything), image)
    own, others = (soft_targets(image[rows], text[rows], tau, rows) for rows in (first_rank, ~first_rank))
    (separate,) = torch.autograd.grad((own + others) / 2, image)
    (fewer,) = torch.autograd.grad(soft_targets(image[all_but_some], text[all_but_some], tau, all_but_some), image)
    for number, expected in enumerate((whole, separate, fewer)):
        plain, distilled = (torch.cat([rank[number][kind] for rank in ranks]) for kind in (0, 1))
        assert relative_error(distilled - plain, expected) < EXACT, number


def open_clip_step(communicator: Communicator, tau: float, teacher_tau: float) -> list[list[Tensor]]:
    """Return open_clip's and our loss, gradients for this rank's features, and gradient for theta."""
    from open_clip.loss import DistillClipLoss

    share = ROWS // communicator.world_size
    local = slice(communicator.rank * share, (communicator.rank + 1) * share)
    image, text = (x[local].requires_grad_() for x in pairs(ROWS, DIM))
    teacher = (TEACHERS[0][0][local], TEACHERS[0][1][local])
    scale = torch.tensor(1 / tau, dtype=torch.float64, requires_grad=True)
    ranks = {"rank": communicator.rank, "world_size": communicator.world_size}
    loss_of = DistillClipLoss(local_loss=True, gather_with_grad=True, **ranks)
    loss = sum(loss_of(image, text, scale, *teacher, 1 / teacher_tau))
    image_gradient, text_gradient, scale_gradient = torch.autograd.grad(loss, (image, text, scale))
    means = (
        communicator.all_reduce(torch.stack([loss.detach(), scale_gradient / tau]), "test") / communicator.world_size
    )
    theirs = [means[0], image_gradient, text_gradient, means[1]]

    loss_fn = build_loss(
        "openclip",
        communicator,
        DIM,
        betas=NO_MOMENTUM,
        temperature={"initial": tau, "lr": 0.0},
        distill={"temperature": teacher_tau},
    )
    result = call(loss_fn, image, text, teacher=teacher)
    factor = communicator.world_size  # open_clip's gradients are averaged over ranks; ours are summed
    ours = [result.loss, factor * result.image, factor * result.text, *scalar_gradients(loss_fn).values()]
    return [theirs, ours]


def assert_equals_open_clip(theirs: list[Tensor], ours: list[Tensor]) -> None:
    for expected, value in zip(theirs, ours, strict=True):
        assert relative_error(value, expected.expand_as(value)) < 1e-12


def test_openclip_equals_open_clips_distillation() -> None:
    pytest.importorskip("open_clip.loss")
    for tau, teacher_tau in ((0.07, 0.02), (0.01, 0.01), (1.0, 0.1)):
        assert_equals_open_clip(*open_clip_step(Communicator(), tau, teacher_tau))
    for theirs, ours in run_ranks(2, open_clip_step, 0.05, 0.02):
        assert_equals_open_clip(theirs, ours)


@pytest.mark.parametrize("tau", [0.01, 0.07])
def test_float32_is_accurate(tau: float) -> None:
    results: list[Result] = []
    for dtype in (torch.float32, torch.float64):
        loss_fn = build_loss(
            "openclip",
            dim=DIM,
            dtype=dtype,
            temperature={"initial": tau, "lr": 0.0},
            distill={"contrastive_weight": 0.0, "temperature": TEMPERATURES},
        )
        image, text = (x.to(dtype) for x in pairs(ROWS, DIM))
        teachers = [(of_images.to(dtype), of_texts.to(dtype)) for of_images, of_texts in TEACHERS]
        results.append(call(loss_fn, image, text, teacher=teachers))
    single, double = results
    assert relative_error(single.image.double(), double.image) < 1e-6 / tau
    assert float(single.loss) == pytest.approx(float(double.loss), rel=1e-5)
    assert float(single.metrics["distill_loss"]) == pytest.approx(float(single.loss), rel=1e-6)


def test_a_teacher_that_the_student_equals_has_no_gradient() -> None:
    image, text = pairs(ROWS, DIM)
    distill = {"contrastive_weight": 0.0, "temperature": TAU}
    loss_fn = build_loss("openclip", temperature={"initial": TAU}, distill=distill)
    result = call(loss_fn, image, text, teacher=(image, text))
    assert float(result.image.abs().max()) < 1e-14


def test_options_that_do_not_fit_are_refused() -> None:
    image, text = pairs(ROWS, DIM)
    loss_fn = build_loss("openclip", distill={"temperature": [0.1, 0.1, 0.1]})
    with pytest.raises(ValueError, match="3 values for 2 teachers"):
        loss_fn(image, text, teacher=TEACHERS)
    for options, message in (
        ({"temperature": [0.1] * 3, "features": ["a", "b"]}, "3 values for 2 teachers"),
        ({"temperature": 0.0}, "must be above 0"),
        ({"weight": 0.0}, "greater than 0"),
    ):
        with pytest.raises(UserError, match=message):
            build_loss("openclip", distill=options)
