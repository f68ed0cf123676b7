"""Check `begin`: the results, what is sent when, that the host does not wait for other ranks, and wrong calls."""

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from build import SAMPLES
from ranks import run_ranks
from test_contrastive_loss import DIM, ROWS, features, loss_of, state_of
from torch import Tensor, nn
from torch.nn.functional import normalize

from neuclip_ds.config import Config
from neuclip_ds.data.dataset import Batch
from neuclip_ds.data.loader import RankBatch
from neuclip_ds.distributed.communicator import Communicator
from neuclip_ds.engine.config import load_engine_config
from neuclip_ds.engine.device_batches import DeviceBatches
from neuclip_ds.engine.start import start_engine
from neuclip_ds.errors import UserError
from neuclip_ds.losses import ContrastiveLoss, Position
from neuclip_ds.losses.gather import PendingBatch

GATHERS_FOR_FITS = {"amortized": {"width": 0.5, "gather": "fits", "online_every": 2}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("openclip", {}),  # no statistics
    ("fastclip_v3", {}),  # statistics of each sample
    ("isogclr", {}),  # statistics and temperatures of each sample
    ("amorlip", GATHERS_FOR_FITS),  # every other step sends no features
    ("neuclip", {}),  # prototypes
]


def build(name: str, options: dict[str, Any], **changes: Any) -> ContrastiveLoss:
    return loss_of(name, dtype=torch.float64, **options, **changes)


def local_features(communicator: Communicator, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's rows of a global batch: image and text features as leaf tensors, and the index."""
    share = ROWS // communicator.world_size
    local = slice(communicator.rank * share, (communicator.rank + 1) * share)
    image, text, index = features(seed)
    index = index * 83 % SAMPLES  # distinct samples, whose statistics are stored on all ranks
    return image.detach()[local].requires_grad_(), text.detach()[local].requires_grad_(), index[local]


def send(pending: PendingBatch, image: Tensor, text: Tensor) -> None:
    """Send the features in micro-batches, of different sizes for texts and for images."""
    for piece in text.split(2):
        pending.add_text(piece)
    for piece in image.split(3):
        pending.add_image(piece)
    pending.begin_reads()


def gradients(loss: Tensor, *features: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, features)]


def compare_with_one_call(communicator: Communicator) -> int:
    """Compare steps that begin early with plain calls; return the number of compared steps."""
    compared = 0
    for name, options in CASES:
        begun = build(name, options)
        plain = build(name, options)
        for step in range(6):
            image, text, index = local_features(communicator, step)
            valid = None
            if step == 2:
                valid = torch.ones(len(index), dtype=torch.bool)
                valid[: 1 + communicator.rank] = False
            if step == 4:
                begun.eval()
                plain.eval()
            else:
                begun.train()
                plain.train()
            pending = begun.begin(index, valid)
            send(pending, image, text)
            results = gradients(begun(image, text, pending=pending), image, text)
            expected = gradients(plain(image, text, index, valid), image, text)
            for result, value in zip(results, expected, strict=True):
                assert torch.equal(result, value), f"{name}, step {step}"
            assert begun.metrics == plain.metrics, f"{name}, step {step}"
            torch.testing.assert_close(state_of(begun), state_of(plain), rtol=0, atol=0, equal_nan=True)
            compared += 1
    return compared


def test_features_sent_in_micro_batches_give_the_bits_of_one_call() -> None:
    """The results are equal even with invalid rows, in evaluation mode, and on steps that send no features."""
    steps = 6 * len(CASES)
    assert compare_with_one_call(Communicator()) == steps
    assert run_ranks(2, compare_with_one_call) == [steps, steps]


def traffic_of_calls(communicator: Communicator, name: str, options: dict[str, Any], steps: int) -> list[Any]:
    """Run steps, and return the bytes that each call of the last step sends, by purpose, in the order of the calls."""
    loss_fn = build(name, options, communicator=communicator)
    sent: list[Any] = []

    def run(call: str, work: Callable[[], Any]) -> Any:
        communicator.traffic.clear()
        result = work()
        bytes_sent: dict[str, int] = {}
        for purpose, traffic in communicator.traffic.items():
            if traffic.calls:
                bytes_sent[purpose] = traffic.bytes_sent
        sent.append((call, bytes_sent))
        return result

    for step in range(steps):
        sent.clear()
        image, text, index = local_features(communicator, step)
        pending = run("begin", lambda index=index: loss_fn.begin(index))
        for piece in text.split(2):
            run("add_text", lambda piece=piece, pending=pending: pending.add_text(piece))
        run("add_image", lambda image=image, pending=pending: pending.add_image(image))
        run("begin_reads", lambda pending=pending: pending.begin_reads())
        run("loss", lambda image=image, text=text, pending=pending: loss_fn(image, text, pending=pending))
    return sent


def traffic_by_method(communicator: Communicator) -> dict[str, list[Any]]:
    return {
        "openclip": traffic_of_calls(communicator, "openclip", {}, steps=1),
        "fastclip_v3": traffic_of_calls(communicator, "fastclip_v3", {}, steps=1),
        "isogclr": traffic_of_calls(communicator, "isogclr", {}, steps=1),
        "amorlip": traffic_of_calls(communicator, "amorlip", GATHERS_FOR_FITS, steps=2),
    }


def test_each_call_sends_only_what_it_names() -> None:
    """Indices in begin, texts in add_text, images in add_image, and statistics in begin_reads, on all ranks alike."""
    first, second = run_ranks(2, traffic_by_method)
    assert first == second
    rows = ROWS // 2
    index_bytes = 8 * rows
    row_bytes = 8 * DIM
    features_in_order = [
        ("begin", {"features": index_bytes}),
        *[("add_text", {"features": 2 * row_bytes})] * 3,
        ("add_image", {"features": rows * row_bytes}),
    ]
    for name in ("openclip", "fastclip_v3", "isogclr"):
        *before_reads, (_, read), (_, in_loss) = first[name]
        assert before_reads == features_in_order, name
        assert set(read) == (set() if name == "openclip" else {"state"}), name
        assert in_loss and not {"features", "state"} & set(in_loss), name
    # this step of amorlip fits no net: only the number of valid rows is sent
    *before_loss, (_, in_loss) = first["amorlip"]
    calls = ("begin", "add_text", "add_text", "add_text", "add_image", "begin_reads")
    assert before_loss == [(call, {"features": 8} if call == "begin" else {}) for call in calls]
    assert "features" not in in_loss


class _Towers(nn.Module):
    """Two linear towers that note when both of them have run."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Linear(DIM, DIM)
        self.text = nn.Linear(DIM, DIM)
        self.finished = 0.0

    def forward(
        self, image: Tensor, tokens: Tensor, text_ready: Callable[[Tensor], None] | None, image_first: bool
    ) -> tuple[Tensor, Tensor]:
        text_features = normalize(self.text(tokens), dim=1)
        if text_ready is not None:
            text_ready(text_features)
        image_features = normalize(self.vision(image), dim=1)
        self.finished = time.perf_counter()
        return image_features, text_features


def seconds_of_calls(communicator: Communicator) -> tuple[float, float]:
    """Return how long the second step takes to begin and send the features, and to compute the loss after that."""
    loss_fn = build("fastclip_v3", {})
    for step in range(2):
        image, text, index = local_features(communicator, step)
        communicator.barrier()
        if step == 1 and communicator.rank == 1:
            time.sleep(1)
        start = time.perf_counter()
        pending = loss_fn.begin(index)
        pending.add_text(text)
        pending.add_image(image)
        sent = time.perf_counter()
        pending.begin_reads()
        loss_fn(image, text, pending=pending)
        end = time.perf_counter()
    return sent - start, end - sent


def seconds_of_engine(communicator: Communicator) -> tuple[float, float]:
    """Return how long the second step of an engine takes until both towers have run, and until the loss after that."""
    config = Config.model_validate({"data": {"batch_size": ROWS}, "deepspeed": "zero1_fp32"})
    towers = _Towers()
    engine = start_engine(towers, config.optimizer, load_engine_config(config, 2), communicator)
    loss_fn = loss_of("fastclip_v3", communicator=communicator)
    for step in range(2):
        image, text, index = (value.detach() for value in local_features(communicator, step))
        valid = torch.ones(len(index), dtype=torch.bool)
        batches = DeviceBatches(torch.device("cpu"), micro_batch=len(index))
        batches.start(iter([RankBatch([Batch(image=image.float(), tokens=text.float(), index=index, valid=valid)])]))
        batch = next(batches)
        communicator.barrier()
        if step == 1 and communicator.rank == 1:
            time.sleep(1)
        start = time.perf_counter()
        pending = loss_fn.begin(index)
        image_features, text_features = engine.encode(batch, pending, step)
        loss_fn(image_features, text_features, pending=pending)
        end = time.perf_counter()
    return towers.finished - start, end - towers.finished


def seconds_of_steps(communicator: Communicator) -> list[tuple[float, float]]:
    return [seconds_of_calls(communicator), seconds_of_engine(communicator)]


def test_the_host_waits_for_a_late_rank_only_after_both_towers_have_been_launched() -> None:
    """Rank 1 begins its step one second late."""
    rank_0, _ = run_ranks(2, seconds_of_steps)
    for launching, waiting in rank_0:
        assert launching < 0.5
        assert waiting > 0.5


def lost_batch(communicator: Communicator) -> list[str]:
    """Pass batches with one valid row on all ranks; return the errors, and run a step after each of them."""
    messages: list[str] = []
    for name, options in (("openclip", {}), ("amorlip", GATHERS_FOR_FITS)):
        loss_fn = build(name, options)
        loss_fn(*local_features(communicator, 0))
        image, text, index = local_features(communicator, 1)
        valid = torch.zeros(len(index), dtype=torch.bool)
        valid[0] = communicator.rank == 0
        with pytest.raises(UserError) as direct:
            loss_fn(image, text, index, valid)
        messages.append(str(direct.value))
        pending = loss_fn.begin(index, valid)
        send(pending, image, text)
        with pytest.raises(UserError) as begun:
            loss_fn(image, text, pending=pending)
        messages.append(str(begun.value))
        assert loss_fn(image, text, index).isfinite()
    return messages


def test_a_batch_with_fewer_than_two_valid_rows_is_an_error_on_all_ranks() -> None:
    for messages in (lost_batch(Communicator()), *run_ranks(2, lost_batch)):
        assert len(messages) == 4
        for message in messages:
            assert message.startswith(f"Step 2: only 1 of the batch's {ROWS} samples can be used")


def late_process_group(communicator: Communicator) -> float:
    with patch("torch.distributed.is_initialized", return_value=False):
        loss_fn = build("openclip", {})
    image, text, index = local_features(communicator, 0)
    pending = loss_fn.begin(index)
    send(pending, image, text)
    return float(loss_fn(image, text, pending=pending).detach())


def test_a_loss_that_is_built_before_the_process_group_covers_all_ranks() -> None:
    one_rank = float(build("openclip", {})(*features(0)).detach())
    assert run_ranks(2, late_process_group) == pytest.approx([one_rank, one_rank])


def begun(loss_fn: ContrastiveLoss) -> tuple[PendingBatch, Tensor, Tensor]:
    """Begin a batch and add its features."""
    image, text, index = features(0)
    pending = loss_fn.begin(index)
    send(pending, image, text)
    return pending, image, text


def test_a_second_begin_is_refused_until_the_first_batch_is_passed_on_or_abandoned() -> None:
    loss_fn = build("fastclip_v3", {})
    pending, image, text = begun(loss_fn)
    with pytest.raises(RuntimeError, match=r"begin\(\) was called twice"):
        begun(loss_fn)
    loss_fn(image, text, pending=pending)
    begun(loss_fn)
    loss_fn.abandon()
    pending, image, text = begun(loss_fn)
    loss_fn(image, text, pending=pending)


def test_an_exception_in_the_loss_abandons_the_batch() -> None:
    loss_fn = build("fastclip_v3", {})
    pending, image, text = begun(loss_fn)
    with patch.object(loss_fn, "function", side_effect=MemoryError), pytest.raises(MemoryError):
        loss_fn(image, text, pending=pending)
    with pytest.raises(RuntimeError, match="not the batch of the last begin"):
        loss_fn(image, text, pending=pending)
    pending, image, text = begun(loss_fn)
    loss_fn(image, text, pending=pending)


def test_each_batch_is_passed_to_its_loss_once() -> None:
    loss_fn = build("fastclip_v3", {})
    pending, image, text = begun(loss_fn)
    other_pending, _, _ = begun(build("fastclip_v3", {}))
    for wrong in (other_pending, None):
        with pytest.raises(RuntimeError, match="not the batch of the last begin"):
            loss_fn(image, text, pending=wrong)
    loss_fn(image, text, pending=pending)  # the batch has not been lost
    with pytest.raises(RuntimeError, match="not the batch of the last begin"):
        loss_fn(image, text, pending=pending)


@pytest.mark.parametrize(
    "arguments",
    [
        {"index": torch.arange(ROWS)},
        {"valid": torch.ones(ROWS, dtype=torch.bool)},
        {"position": Position(step=0, lr=1e-3, peak_lr=1e-3)},
    ],
    ids=["index", "valid", "position"],
)
def test_arguments_of_begin_are_refused_next_to_a_pending_batch(arguments: dict[str, Any]) -> None:
    loss_fn = build("fastclip_v3", {})
    pending, image, text = begun(loss_fn)
    with pytest.raises(RuntimeError, match=r"Pass index, valid, position and stored features to begin\(\)"):
        loss_fn(image, text, pending=pending, **arguments)


@pytest.mark.parametrize("begins_in_training", [True, False])
def test_begin_and_the_loss_must_be_in_the_same_mode(begins_in_training: bool) -> None:
    loss_fn = build("fastclip_v3", {}).train(begins_in_training)
    pending, image, text = begun(loss_fn)
    with pytest.raises(RuntimeError, match=r"were called in different modes"):
        loss_fn.train(not begins_in_training)(image, text, pending=pending)


def test_begin_refuses_indices_and_masks_that_cannot_be_used() -> None:
    loss_fn = build("fastclip_v3", {})
    with pytest.raises(ValueError, match="index 1000 is outside"):
        loss_fn.begin(torch.tensor([0, 1000]))
    with pytest.raises(ValueError, match=r"index has dtype torch\.float32"):
        loss_fn.begin(torch.arange(2.0))
    with pytest.raises(ValueError, match=r"must be a bool tensor of shape \(2,\)"):
        loss_fn.begin(torch.arange(2), torch.ones(3, dtype=torch.bool))
    begun(loss_fn)  # nothing has begun before


def test_features_that_are_missing_or_repeated_are_refused() -> None:
    loss_fn = build("fastclip_v3", {})
    image, text, index = features(0)
    pending = loss_fn.begin(index)
    pending.add_text(text)
    with pytest.raises(RuntimeError, match=r"add_text\(\) has received 12 rows and add_image\(\) 0"):
        loss_fn(image, text, pending=pending)
    pending, image, text = begun(loss_fn)
    pending.add_text(text[:1])
    with pytest.raises(RuntimeError, match=r"add_text\(\) has received 13 rows and add_image\(\) 12"):
        loss_fn(image, text, pending=pending)


def test_begin_needs_the_dtype_of_float64_features() -> None:
    loss_fn = loss_of("fastclip_v3")
    pending, image, text = begun(loss_fn)
    with pytest.raises(RuntimeError, match=r"build the loss with dtype=torch\.float64"):
        loss_fn(image, text, pending=pending)


def test_a_loaded_state_ends_the_batch_that_has_begun() -> None:
    loss_fn = loss_of("fastclip_v3", undo=True, dtype=torch.float64)
    image, text, index = features(0)
    loss_fn(image, text, index)
    saved = loss_fn.state_dict()
    loss_fn.begin(index)
    loss_fn.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="no training call to revert"):
        loss_fn.undo()
    loss_fn(image, text, index)


def test_features_of_another_width_are_refused() -> None:
    loss_fn = loss_of("openclip", dtype=torch.float64)
    image, text, index = features(0)
    pending = loss_fn.begin(index)
    send(pending, image[:, :3], text[:, :3])
    with pytest.raises(RuntimeError, match="built with dim=6"):
        loss_fn(image[:, :3], text[:, :3], pending=pending)


@pytest.mark.parametrize(
    ("method", "name"), [("siglip", "reference"), ("tuneclip", "reference"), ("openclip", "techer")]
)
def test_stored_features_that_the_loss_cannot_use_cannot_be_added(method: str, name: str) -> None:
    loss_fn = loss_of(method, dtype=torch.float64)
    image, text, index = features(0)
    pending = loss_fn.begin(index)
    with pytest.raises(ValueError, match=f"cannot use stored features of '{name}'"):
        pending.add_stored(name, image, text)
