"""`Engine`, a wrapper of DeepSpeed's engine that runs the passes of the towers in a training step.

Only this package uses DeepSpeed's engine object; other packages use `Engine`.

A step is `encode`, the loss, `backward` and `step`. If a rank's batch is larger than the micro-batch, the towers run
twice, as in GradCache: `encode` computes the features without a graph, and `backward` runs each micro-batch again.
Dropout is seeded by (seed, step, rank, micro-batch). A frozen tower runs only in the first pass, except under ZeRO 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.profiler import record_function

from neuclip_ds.distributed.communicator import PHASE, Communicator
from neuclip_ds.engine import zero
from neuclip_ds.engine.device_batches import DeviceBatch, MicroBatch
from neuclip_ds.errors import UserError
from neuclip_ds.losses.accumulate import MicroBatches, with_gradients
from neuclip_ds.losses.batch_norm import batch_norms
from neuclip_ds.losses.gather import PendingBatch
from neuclip_ds.models.packing import Pack, pack_captions
from neuclip_ds.models.towers import TextTower

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """Result of a weight update; equal on all ranks."""

    gradient_norm: float  # not finite if the update was skipped
    applied: bool  # False if the update was skipped


@dataclass(frozen=True, kw_only=True)
class _SecondPass:
    """Inputs of the second pass over a batch's micro-batches."""

    micro_batches: Iterator[MicroBatch]
    count: int  # number of micro-batches
    passes: MicroBatches
    image: Tensor  # (b, d) image features of the first pass
    text: Tensor  # (b, d) text features of the first pass


class Engine:
    """A wrapper of DeepSpeed's engine for a `DualEncoder`; `start_engine` builds it.

    Attributes:
        module: the towers.
        communicator: communicator between the engine's ranks.
        device: the device of the towers.
        wrapper: kind of DeepSpeed's wrapper around the optimizer.
    """

    def __init__(self, deepspeed_engine: Any, communicator: Communicator, seed: int = 0) -> None:
        """
        Args:
            deepspeed_engine: DeepSpeed's engine; gradient_accumulation_steps must be 1.
            communicator: communicator between the engine's ranks.
            seed: seed for dropout.
        """
        self._deepspeed = deepspeed_engine
        self.communicator = communicator
        self._seed = seed
        self.module: nn.Module = deepspeed_engine.module
        self.device = communicator.device
        self.wrapper = zero.wrapper_of(deepspeed_engine.optimizer)

        self.module.train()  # frozen parts of the towers stay in evaluation mode
        self._batch_norms = [layer for layer in batch_norms(self.module) if layer.training]
        self._statistics = [buffer for layer in self._batch_norms for buffer in layer.buffers()]
        self._statistics_before: list[Tensor] = []  # before the forward pass
        # With several ranks, the gather of the text features overlaps the image tower. With one, nothing is gathered; a
        # GPU then starts with the image tower's long kernels, during which the host launches those of the text tower.
        self._image_first = communicator.world_size == 1
        self._image_runs_twice = self._runs_twice("vision")
        self._text_runs_twice = self._runs_twice("text")
        self._second_pass: _SecondPass | None = None  # between `encode` and `backward`

    @property
    def pack(self) -> Pack | None:
        """Function that packs captions for the text tower; None if the tower takes padded captions on this device."""
        tower = getattr(self.module, "text", None)
        if isinstance(tower, TextTower) and tower.packs_on(self.device):
            return tower.pack
        return None

    def try_full_captions(self, batch: DeviceBatch) -> None:
        """Run the towers on black images and captions of the full context length, without changing any state.

        With packed captions, the memory of a step depends on their lengths. This method checks, before the first step,
        whether the memory suffices for the longest captions; all ranks call it together. It runs the passes of one
        micro-batch or, if the batch has several micro-batches, of two, because the gradients of the first exist during
        the second. The gradients are NaN, so that the update is skipped on all ranks.

        Args:
            batch: a batch of the run; only its shapes are used.

        Raises:
            UserError: the device's memory is exhausted.
        """
        rows = batch.rows[0]
        image, tokens = batch.host.pieces(rows)[0]
        size = rows.stop - rows.start
        context_length = tokens.shape[1]
        pixels = torch.zeros(size, *image.shape[1:], dtype=image.dtype, device=self.device)
        full_tokens = torch.zeros(size, context_length, dtype=tokens.dtype)
        full_tokens[:, -1] = 1
        captions = pack_captions(full_tokens, eos_id=1).to(self.device)
        passes = min(2, len(batch.rows))

        counters = self.counters
        self._statistics_before = [statistic.clone() for statistic in self._statistics]
        if not self.module.training:
            self._deepspeed.train()
        try:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                for number in range(passes):
                    features = self._deepspeed(pixels, captions, None, self._image_first)
                    sums = [feature.sum() for feature in features if feature.requires_grad]
                    self._backpropagate(math.nan * torch.stack(sums).sum(), is_last=number + 1 == passes)
                update = self.step(lr=0.0)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"A micro-batch of {size} pairs with captions of {context_length} tokens does not fit in the device's "
                "memory: lower data.micro_batch, set model.activation_checkpointing=true, or use a higher ZeRO stage."
            ) from error
        assert not update.applied
        self.set_counters(counters)

    # The passes of a training step

    def encode(self, batch: DeviceBatch, pending: PendingBatch, step: int) -> tuple[Tensor, Tensor]:
        """Run the towers on all rows of this rank's batch, in training mode.

        Args:
            batch: the batch, whose micro-batches have equal sizes.
            pending: receives the features of each micro-batch as soon as they are computed, texts before images. After
                the towers of the first micro-batch have been launched, `pending.begin_reads` is called, on all ranks
                at the same point of the program.
            step: number of steps before this one, which selects the dropout masks.

        Returns:
            (b, d) image and text features, through which `backward` reaches the towers: with one micro-batch, the
            towers' outputs; with several, leaves that require gradients.
        """
        if not self.module.training:  # train() visits every module
            self._deepspeed.train()
        self._statistics_before = [statistic.clone() for statistic in self._statistics]
        count = len(batch.rows)
        if count == 1:
            self._second_pass = None
            self._seed_dropout(step, 0)
            return self._run_towers(next(batch.micro_batches(passes=1)), pending, is_first=True)

        passes = MicroBatches(self._batch_norms)
        micro_batches = batch.micro_batches(passes=2)
        for number in range(count):
            self._seed_dropout(step, number)
            with passes.features():
                image, text = self._run_towers(next(micro_batches), pending, is_first=number == 0)
            passes.add(image, text)
        image, text = passes.concatenated_features()
        image.requires_grad_()
        text.requires_grad_()
        self._second_pass = _SecondPass(micro_batches=micro_batches, count=count, passes=passes, image=image, text=text)
        return image, text

    def backward(self, value: Tensor) -> None:
        """Compute the gradients of the weights; a `value` that is not finite makes all of them NaN.

        Args:
            value: 0-dim loss made from the features that `encode` returned. DeepSpeed averages gradients over ranks, so
                the loss's gradient with respect to the features must be multiplied by the number of ranks.
        """
        value = nan_unless_finite(value, value.detach())
        second_pass = self._second_pass
        self._second_pass = None
        if second_pass is None:
            self._backpropagate(value, is_last=True)
            return

        # the gradients of the features, of all micro-batches together
        with record_function(f"{PHASE}backward"):
            value.backward()
        passes = second_pass.passes
        passes.set_feature_gradients(_gradient_of(second_pass.image), _gradient_of(second_pass.text))
        # the gradients of the weights, one micro-batch at a time
        for _ in range(second_pass.count):
            with passes.gradients():
                image, text = self._run_towers_again(next(second_pass.micro_batches))
                outputs, gradients = passes.trainable_outputs_and_gradients(image, text)
                self._backpropagate(with_gradients(value.detach(), outputs, gradients), passes.is_last)

    def step(self, lr: float) -> WeightUpdate:
        """Update the weights, or skip the update on all ranks if the gradient is not finite on any rank.

        A skipped update leaves the weights and moments unchanged, and restores batch-norm statistics from before
        `encode`.

        Args:
            lr: learning rate; each parameter group uses `lr` times its `lr_scale`.
        """
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        with record_function(f"{PHASE}optimizer"):
            update = self._update_weights()
        if not update.applied:
            for statistic, before in zip(self._statistics, self._statistics_before, strict=True):
                statistic.copy_(before)
        return update

    def _run_towers(self, micro_batch: MicroBatch, pending: PendingBatch, is_first: bool) -> tuple[Tensor, Tensor]:
        """Return the (m, d) image and text features of a micro-batch, and add them to `pending`."""
        pixels, tokens = micro_batch
        with record_function(f"{PHASE}forward"):
            # docs: towers
            features: tuple[Tensor, Tensor] = self._deepspeed(pixels, tokens, pending.add_text, self._image_first)
            pending.add_image(features[0])
            if is_first:
                pending.begin_reads()
            # docs: end
        return features

    def _run_towers_again(self, micro_batch: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        """Return a micro-batch's features with their autograd graph; None for frozen towers that need not run again."""
        pixels, tokens = micro_batch
        with record_function(f"{PHASE}forward"):
            features: tuple[Tensor | None, Tensor | None] = self._deepspeed(
                pixels if self._image_runs_twice else None,
                tokens if self._text_runs_twice else None,
                None,
                self._image_first,
            )
        return features

    def _runs_twice(self, tower: str) -> bool:
        if zero.fetches_weights(self.module):
            return True
        parameters = getattr(self.module, tower, self.module).parameters()
        return any(parameter.requires_grad for parameter in parameters)

    def _backpropagate(self, value: Tensor, is_last: bool) -> None:
        """Compute the weights' gradients and add them to those of earlier calls; `is_last` marks a step's last call."""
        # docs: backward
        self._deepspeed.set_gradient_accumulation_boundary(is_last)
        with record_function(f"{PHASE}backward"):
            self._deepspeed.backward(value)
        # docs: end

    def _update_weights(self) -> WeightUpdate:
        optimizer = self._deepspeed.optimizer
        if self.wrapper is not zero.Wrapper.NONE:  # DeepSpeed's wrappers decide whether to skip
            # docs: update
            self._deepspeed.step()
            applied = self._deepspeed.was_step_applied()
            if not applied:
                zero.discard_gradients(optimizer)
            norm = float(self._deepspeed.get_global_grad_norm())
            # docs: end
            return WeightUpdate(gradient_norm=norm, applied=applied)
        # without a wrapper, DeepSpeed would also apply a gradient that is not finite
        gradients = [weight.grad for weight in self.module.parameters() if weight.grad is not None]
        norm = float(get_total_norm(gradients))
        applied = math.isfinite(norm)
        if applied:
            self._deepspeed.step()
        else:
            optimizer.zero_grad()
            self._deepspeed.skipped_steps += 1
        return WeightUpdate(gradient_norm=norm, applied=applied)

    def _seed_dropout(self, step: int, micro_batch: int) -> None:
        """Seed dropout with (seed, step, rank, micro-batch), so that a resumed run draws the same masks."""
        position = step * self.communicator.world_size + self.communicator.rank
        seed = ((self._seed * 1_000_003 + position) * 65_537 + micro_batch) % 2**63
        # torch.manual_seed seeds every kind of device, which takes 0.3 ms even without a GPU
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    # Evaluation

    def eval(self) -> None:
        """Put the towers into evaluation mode."""
        self._deepspeed.eval()

    def __call__(self, image: Tensor | None, tokens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the features of the images and of the captions, as `DualEncoder` does; all ranks call this together.

        Under ZeRO 3, the inputs must have the same shapes on all ranks.
        """
        features: tuple[Tensor | None, Tensor | None] = self._deepspeed(image, tokens, None, self._image_first)
        return features

    # Weights and optimizer state, which ZeRO may partition

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, or 0 without ZeRO."""
        return int(self._deepspeed.zero_optimization_stage())

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Return the full shapes of all parameters by name."""
        return zero.parameter_shapes(self.module)

    def placements(self) -> Iterator[zero.Placement]:
        """Yield the placement of this rank's part of every parameter, in the same order on all ranks."""
        return zero.placements(self._deepspeed.optimizer, self.module, self.communicator.rank)

    @property
    def optimizer_state(self) -> Mapping[Tensor, dict[str, Any]]:
        """The optimizer's state of each master weight; its tensors are shaped like the master weight or 0-dim."""
        state: Mapping[Tensor, dict[str, Any]] = self._deepspeed.basic_optimizer.state
        return state

    def set_optimizer_state(self, master: Tensor, tensors: Mapping[str, Tensor], scalars: Mapping[str, Tensor]) -> None:
        """Replace the optimizer's state of a master weight; `scalars` are the 0-dim tensors."""
        optimizer = self._deepspeed.basic_optimizer
        # a fused optimizer counts its steps on the device; other optimizers count on the CPU
        counter_device = master.device if optimizer.defaults.get("fused") else torch.device("cpu")
        state = {kind: scalar.to(counter_device) for kind, scalar in scalars.items()}
        optimizer.state[master] = {**state, **tensors}

    def clear_optimizer_state(self) -> None:
        """Drop the optimizer's state of all master weights on this rank; a new engine has none either."""
        self._deepspeed.basic_optimizer.state.clear()

    @contextmanager
    def changing_master_weights(self) -> Iterator[None]:
        """Allow the `with` block to change master weights, and copy them to the towers' weights at the end.

        All ranks must use this together. After an error, nothing is copied, because copying requires all ranks.
        """
        zero.release_gathered(self._deepspeed.optimizer)
        yield
        zero.refresh_weights(self._deepspeed.optimizer)

    def replicas(self) -> dict[str, Tensor]:
        """Return the tensors that must be bit-identical on all ranks.

        These are the frozen weights under ZeRO 3; all weights under ZeRO 1 and 2; and the weights, the master weights
        and the optimizer's state without ZeRO.
        """
        weights = zero.replicated_weights(self.module)
        tensors = dict(weights)
        for placement in self.placements():
            if placement.replicated:
                if placement.master is not weights[placement.name]:
                    tensors[f"{placement.name} (float32)"] = placement.master
                for kind, value in self.optimizer_state.get(placement.master, {}).items():
                    tensors[f"{placement.name} ({kind})"] = value
        return tensors

    # Counters

    @property
    def skipped_steps(self) -> int:
        """Number of skipped updates so far."""
        return int(self._deepspeed.skipped_steps)

    @property
    def counters(self) -> dict[str, int]:
        """The numbers of steps, samples and skipped steps so far, by DeepSpeed's names."""
        return {name: int(getattr(self._deepspeed, name)) for name in _COUNTERS}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set the counters to values that `counters` has returned, perhaps in an earlier launch."""
        for name in _COUNTERS:
            setattr(self._deepspeed, name, counters[name])

    # The end of a run

    def close(self) -> None:
        """Remove DeepSpeed's hooks, which would keep the model and the optimizer in memory; no step may follow."""
        self._deepspeed.destroy()
        zero.release_globals()


def nan_unless_finite(value: Tensor, checked: Tensor) -> Tensor:
    """Return `value`, or NaN if `checked` is not finite, without a copy to the host; both are 0-dim.

    The gradients of a NaN result are NaN as well, and the optimizer rejects them on all ranks.
    """
    return value * (1 + 0 * checked)


def _gradient_of(features: Tensor) -> Tensor:
    """Return the gradient of leaf features, which is zero if the loss does not depend on them."""
    return torch.zeros_like(features) if features.grad is None else features.grad
