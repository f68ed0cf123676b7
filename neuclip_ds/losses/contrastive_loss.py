"""`ContrastiveLoss`, the loss module for any training loop; the package's trainer uses it too."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import pad

from neuclip_ds.distributed.communicator import Communicator, ProcessGroup
from neuclip_ds.errors import UserError
from neuclip_ds.losses import saved_state
from neuclip_ds.losses.accumulate import TwoPass, with_gradients
from neuclip_ds.losses.arithmetic import products_exact_for
from neuclip_ds.losses.base import CLIP_TEMPERATURE, AdamSettings, LossContext, LossFunction, Position
from neuclip_ds.losses.checks import (
    problem_with_features,
    problem_with_norms,
    problem_with_rows,
    raise_if_ranks_disagree,
)
from neuclip_ds.losses.eager import not_compiled
from neuclip_ds.losses.gather import PendingBatch, all_valid
from neuclip_ds.losses.global_contrastive import GlobalContrastiveLoss
from neuclip_ds.losses.method import LossBuilder
from neuclip_ds.losses.methods import DEFAULT, find_method
from neuclip_ds.losses.options import ObjectiveConfig, objective_config
from neuclip_ds.losses.prefixes import PrefixedLoss, build_function
from neuclip_ds.losses.stored_features import REFERENCE, TEACHER, StoredBatch, StoredRows, Teachers
from neuclip_ds.losses.temperature import trained_temperature
from neuclip_ds.losses.undo import UndoGuard

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _StoredKind:
    """Wording of messages about one kind of stored features."""

    option: str
    """Option that requires the features in every batch."""
    form: str
    """Argument in which to pass the features."""
    use: str
    """Purpose of the features, followed by the option in parentheses."""
    advice: str
    """What to do if a loss cannot use the features."""


_STORED_KINDS = {
    REFERENCE: _StoredKind(
        option="reference_model",
        form="reference=(image, text)",
        use="a reference model (reference_model)",
        advice="docs/reference/losses.md lists the losses that can.",
    ),
    TEACHER: _StoredKind(
        option="distill.features",
        form="teacher=(image, text), or a list of such pairs",
        use="distillation (distill)",
        advice="use a loss of the package, or one that is built from GlobalContrastiveLoss.",
    ),
}


class ContrastiveLoss(nn.Module):
    """Contrastive loss over the global batch of all ranks, with the exact gradient of its method.

    Each training call also updates the learned temperature, SigLIP's bias and the method's networks, as the papers'
    algorithms do, with separate optimizers. The module therefore has no parameters and does not need DDP or FSDP.

    Each call in training mode is one step. Under `eval()` or `torch.no_grad()`, the loss does not update any state, and
    `index` may be None. To send features while the towers still run, use `begin`.

    Example:
        import torch
        from torch.nn.functional import normalize
        from neuclip_ds import ContrastiveLoss

        loss_fn = ContrastiveLoss("fastclip_v3", dim=64, samples=1000, epochs=30, steps_per_epoch=125)
        image, text = torch.randn(2, 8, 64, requires_grad=True)  # from the towers: (b, d) each
        index = torch.arange(8)  # positions of the samples in the training set
        loss = loss_fn(normalize(image, dim=1), normalize(text, dim=1), index)
        loss.backward()
        print(loss_fn.metrics["batch_loss"], loss_fn.temperature)

    Attributes:
        lr: current learning rate of the encoders. With `temperature.schedule=encoder`, the learning rates of the
            temperature and of SigLIP's bias follow it; with `npn.order=joint`, so does that of the prototypes. Set `lr`
            before each training call, or before `begin` if you use it: `loss_fn.lr = scheduler.get_last_lr()[0]`.
        scaler: the training loop's `torch.amp.GradScaler`, if any. If it is enabled, the loss reverts the state updates
            of a call whose step the scaler skipped, and accepts features that are not finite.
        validates: whether calls check their arguments.
        function: the method's loss as a function of the gathered features, with its state.
        metric_tensors: 0-dim metrics of the last call, by name, on the features' device.
        feature_gradient_norm: norm of the gradient of the last call's loss with respect to the features of all ranks, a
            0-dim tensor; None before the first call.
    """

    def __init__(
        self,
        method: str | ObjectiveConfig | LossBuilder = DEFAULT,
        *,
        dim: int,
        samples: int = 0,
        epochs: float = 1.0,
        steps_per_epoch: int | None = None,
        lr: float = 5e-4,
        betas: tuple[float, float] = (0.9, 0.98),
        adam_eps: float = 1e-6,
        reduction: Literal["ddp_mean", "sum"] = "ddp_mean",
        group: ProcessGroup | None = None,
        communicator: Communicator | None = None,
        scaler: GradScaler | None = None,
        undo: bool = False,
        validate: bool = True,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        spare_row: bool = True,
        encoder_temperature: float | None = 0.07,
        encoder_bias: float | None = -10.0,
        **options: Any,
    ) -> None:
        """
        Args:
            method: name of a loss, such as `fastclip_v3`, by default `openclip`; or an `ObjectiveConfig`, such as
                `config.objective` of a run; or a function that builds a loss from outside the package, such as the
                result of `autograd_loss`.
            dim: width d of the features.
            samples: size n of the training set, required by methods that keep statistics per sample, by
                `neuclip_queue` and by `temperature={"rule": "learned"}`.
            epochs: length of the run in epochs, for schedules.
            steps_per_epoch: training calls per epoch. Unless `epoch_steps` is set, required by `amorlip` and by moving
                averages with `gamma="cosine"`. Always required by individual temperatures with
                `reference="released_code"`, and if `temperature.rho` is a list.
            lr: peak learning rate of the encoders.
            betas: Adam betas for the temperature, SigLIP's bias and, with `npn.order=joint`, the prototypes. If
                `temperature.optimizer` is `lion`, it uses both values; `sgd` uses the first one as its momentum.
            adam_eps: Adam epsilon for the same parameters.
            reduction: `ddp_mean` if the encoders' gradients are averaged over ranks (DDP, FSDP, DeepSpeed): the loss
                then multiplies the feature gradients by the world size to compensate. `sum` if they are summed.
            group: process group of the global batch; by default all ranks, or this process if it runs alone.
            communicator: `Communicator` to use instead of `group` and `device`, for a caller that measures the loss's
                traffic.
            scaler: see the `scaler` attribute.
            undo: whether to keep a copy of the state (except the per-sample statistics), so that `undo()` can revert
                the last training call. With a `scaler`, the copy is always kept.
            validate: whether to check the arguments of each call on all ranks. This costs one small collective and, on
                a GPU, one host synchronization per call, and one more for each reference or teacher whose features are
                on the GPU. Calls with `pending` skip this check; `begin` checks its arguments separately on each rank,
                without communication. Without validation, all ranks must pass the same number of rows.
            device: initial device of the loss's state. A call without `pending` moves the state to the features'
                device. `begin` does not move it, so if you use `begin`, set this to the features' device.
            dtype: initial dtype of similarities, losses and state. A call without `pending` changes it to float64 for
                features in float64, and to float32 for other features.
            spare_row: whether each table of per-sample statistics has an extra row, which calls without `index` use. If
                there is no such row, pass `index` in every call.
            encoder_temperature: tau at step 0 if neither the options nor the method's defaults set it, or if the option
                `temperature={"initial": None}` clears the default. Only `gcl`, `tuneclip` and losses that
                `register_loss` added have no default; a loss that is passed as a function has that of `openclip`, 0.07.
                For encoders from a pretrained checkpoint, pass the checkpoint's temperature as the option
                `temperature={"initial": tau}`.
            encoder_bias: SigLIP's bias at step 0 if you pass `siglip={"bias": None}`; without this option, the bias is
                -10. For encoders from a pretrained checkpoint, pass the checkpoint's bias as `siglip={"bias": bias}`.
            options: options of the method, as under `objective:` in a recipe, such as `temperature={"rho": 6.5}` or
                `npn={"lr": 0.05}`.

        Raises:
            UserError: the method or an option is unknown, a value is missing or invalid, options cannot be combined
                with the method or with each other, or `options` are passed with an `ObjectiveConfig`.
        """
        super().__init__()
        self._config, self._builder = _config_and_builder(method, options)
        self._name = "The loss" if callable(method) else self._config.method  # in messages
        self._require_valid(dim, samples, lr, steps_per_epoch, epochs, reduction, dtype)
        self._dim = dim
        self._samples = samples
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._peak_lr = lr
        self.lr = lr
        self._adam = AdamSettings(betas, adam_eps)
        self._averages_gradients = reduction == "ddp_mean"
        self._given_communicator = communicator
        self._spare_rows = int(spare_row)
        self._encoder_temperature = encoder_temperature
        self._encoder_bias = encoder_bias
        self.validates = validate
        self.scaler = scaler
        self._undo_guard = UndoGuard(always=undo)
        self._pending: PendingBatch | None = None  # begun, but not yet passed to `forward`
        self._warned = False
        self._calls = 0  # training calls so far
        self.metric_tensors: dict[str, Tensor] = {}
        self.feature_gradient_norm: Tensor | None = None
        self._build(Communicator(device, group) if communicator is None else communicator, dtype)
        for stored_name in _STORED_KINDS:
            problem = self._unusable(stored_name) if self._announces(stored_name) else None
            if problem is not None:
                raise UserError(problem)
        if self.function.needs_index and not samples:
            raise UserError(
                f"{self._name} needs the index of each sample: pass the size of the training set as samples=..."
            )

    @property
    def config(self) -> ObjectiveConfig:
        """The options of the method, as under `objective:` in a recipe."""
        return self._config

    @property
    def whole_function(self) -> LossFunction:
        """The loss function of the full-length features: `function` without the losses of `objective.prefixes`."""
        return self.function.whole if isinstance(self.function, PrefixedLoss) else self.function

    @not_compiled
    def begin(
        self,
        index: Tensor,
        valid: Tensor | None = None,
        position: Position | None = None,
        *,
        reference: StoredRows | None = None,
        teacher: Teachers | None = None,
    ) -> PendingBatch:
        """Begin a step before the towers run: send the indices of this rank's samples to the other ranks.

        The stored features of a reference model and of teachers are sent as well.

        In a step, the loss communicates only in this method, in the methods of the batch that it returns, and in the
        call of the loss.

        Args:
            index: (b,) positions of the samples in the training set, in [0, samples), in host memory; b must be equal
                on all ranks.
            valid: (b,) bool in host memory, False for rows to ignore; None if all rows are valid.
            position: position in the training run; by default, the loss counts its own training calls.
            reference: stored features of the samples from a reference model; see `forward`.
            teacher: stored features of the samples from one or more teachers; see `forward`.

        Raises:
            RuntimeError: the batch of the last `begin` has not been passed to the loss; see `abandon`.
            ValueError: stored features have the wrong shape, the method cannot use a reference model or a teacher, the
                options require one and the call lacks its features, the number of teachers does not match
                `distill.temperature` or, with `validate=True`, an argument is invalid (only the rank that makes such a
                call raises the error); or the rank or the world size has changed since the first training call.

        Example:
            import torch
            from torch.nn.functional import normalize
            from neuclip_ds import ContrastiveLoss

            loss_fn = ContrastiveLoss("fastclip_v3", dim=64, samples=1000, epochs=30, steps_per_epoch=125)
            image_tower, text_tower = torch.nn.Linear(32, 64), torch.nn.Linear(48, 64)
            images, texts, index = torch.randn(8, 32), torch.randn(8, 48), torch.arange(8)

            pending = loss_fn.begin(index)
            text_features = normalize(text_tower(texts), dim=1)
            pending.add_text(text_features)
            image_features = normalize(image_tower(images), dim=1)
            pending.add_image(image_features)
            pending.begin_reads()
            loss_fn(image_features, text_features, pending=pending).backward()
        """
        if self._pending is not None:
            raise RuntimeError(
                "begin() was called twice: pass the first batch to the loss (pending=...), or call abandon()."
            )
        stored = StoredBatch.of(reference, teacher)
        problem = self._problem_with_models(stored)
        if self.validates:
            if problem is None:
                problem = problem_with_rows(index, valid, len(index), self._samples)
            if problem is None:
                problem = stored.problem(len(index), valid)
        if problem is not None:
            raise ValueError(problem)
        valid = all_valid(len(index)) if valid is None else valid
        training = self._is_training
        self._move(self._communicator.device, self._dtype, keep=True)
        with torch.no_grad():
            pending = self._begin(index, valid, training, position)
            for name, rows in stored:
                pending.add_stored(name, *rows)
        self._pending = pending
        return pending

    def abandon(self) -> None:
        """Discard the batch that `begin` started; call this if an exception occurs before the loss is called.

        All ranks must call this method, and before it, all must have made the same calls to the batch's methods.
        Otherwise, ranks that have sent features wait for those that have not.
        """
        self._pending = None
        self._undo_guard.abandon()

    @not_compiled
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        index: Tensor | None = None,
        valid: Tensor | None = None,
        *,
        pending: PendingBatch | None = None,
        position: Position | None = None,
        reference: StoredRows | None = None,
        teacher: Teachers | None = None,
    ) -> Tensor:
        """Return the loss of the global batch, the same on all ranks.

        Args:
            image_features: (b, d) normalized rows in float64, float32, bfloat16 or float16; b may differ between ranks,
                except with `pending` or `validate=False`.
            text_features: (b, d) normalized rows.
            index: (b,) positions of the samples in the training set, in [0, samples), needed in training by methods
                that keep statistics per sample and by `neuclip_queue`. If an index is repeated, the statistics of its
                last row are stored. Keep `index` in host memory; otherwise, the host has to wait for a copy from the
                GPU.
            valid: (b,) bool in host memory, False for rows to ignore; None if all rows are valid.
            pending: the batch that `begin` returned, after its features have been added. With `pending`, pass all other
                optional arguments to `begin`, not to this call.
            position: position in the training run; by default, the loss counts its own training calls.
            reference: image and text features of the samples from a reference model, two normalized (b, D) tensors on
                any device. Their similarities are subtracted from the similarities of `image_features` and
                `text_features` (DRRho-CLIP).
            teacher: image and text features of the samples from a teacher, in the same form, or a list with such a pair
                for each teacher. The loss also trains the features' softmax over the batch to match the teachers'; the
                option `distill` contains the settings. Stored features receive no gradient.

        Raises:
            ValueError: with `validate=True` and without `pending`, on all ranks, any rank's arguments are invalid, any
                rank passes stored features that the method cannot use or lacks those that the options require, the
                number of teachers does not match `distill.temperature`, or ranks differ in training mode, in the dtypes
                of the features or in the stored features' number, width or dtype; with `validate=False`, only on the
                rank concerned, stored features are missing, unusable, of the wrong number or of the wrong shape; or the
                rank or the world size has changed since the first training call.
            UserError: fewer than two rows of the global batch are valid, or calls of `neuclip_queue` differ in the
                width of their reference or in whether they pass one.
            RuntimeError: activation checkpointing repeats the call, which would update the loss's state twice;
                `pending` is not the batch of the last `begin`, or is omitted although `begin` was called; the features
                of `pending` are incomplete, or another optional argument is passed with it; `begin` and this call
                differ in training mode or in the number of rows; or, with `pending`, the width of the features is not
                `dim`, or the features are float64, but the loss's `dtype` is not.
        """
        if pending is not self._pending:
            raise RuntimeError(
                "pending is not the batch of the last begin(): pass each batch to the loss once, or call abandon()."
            )
        self._pending = None  # an exception below abandons the batch
        training = self._is_training
        if training and torch._C._current_graph_task_id() >= 0:  # in a backward pass; no public function reports this
            raise RuntimeError(
                "The loss was called in a backward pass, probably because activation checkpointing repeated the call: "
                "apply checkpointing to the towers, but not to the loss."
            )
        # an argument that is not a tensor is reported below, on all ranks
        device = image_features.device if isinstance(image_features, Tensor) else self._communicator.device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            if pending is None:
                stored = StoredBatch.of(reference, teacher)
                pending = self._send(image_features, text_features, index, valid, training, position, stored)
            else:
                if any(argument is not None for argument in (index, valid, position, reference, teacher)):
                    raise RuntimeError(
                        "Pass index, valid, position and stored features to begin(), not to the loss with pending=..."
                    )
                self._require_usable(pending, image_features, text_features, training)
            # docs: forward
            batch = pending.gathered(self._dtype)
            batch.require_pairs(pending.position.step)
            with products_exact_for(torch.float32):
                output = self.function(batch, pending.position, training)
            image_gradient = self._gradient_of_rows(batch.expand(output.image_gradient), len(image_features))
            text_gradient = self._gradient_of_rows(batch.expand(output.text_gradient), len(text_features))
            # docs: end
        self.metric_tensors = output.metrics
        self.feature_gradient_norm = output.gradient_norm
        if training:
            self._calls += 1
            self._undo_guard.commit()
        # docs: forward
        loss = with_gradients(output.loss, (image_features, text_features), (image_gradient, text_gradient))
        # docs: end
        if training and not loss.requires_grad and not self._warned:
            self._warned = True
            log.warning(
                "A training call updated the loss's state, but the features require no gradient. For an evaluation, "
                "call eval() or use torch.no_grad(); for training, do not detach the features."
            )
        return loss

    def undo(self) -> None:
        """Revert the last training call's updates of the state, for example because the optimizer skipped the step.

        The count of training calls, which determines the position in training, still includes the call. Raises
        `RuntimeError` if the loss was built with neither `undo=True` nor a `scaler`, or if there is no call to revert.
        """
        self._undo_guard.undo()

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last call, keyed by name, such as `tau` and `batch_loss` (InfoNCE over the same batch)."""
        return {name: float(value) for name, value in self.metric_tensors.items()}

    @property
    def temperature(self) -> float:
        """Current temperature tau; with individual temperatures, their mean over the batch of the last call.

        The mean is that before the call's update. Before the first call, even after `load`, the initial value is
        returned instead. For a custom loss that has no temperature, the value has no meaning.
        """
        self._undo_guard.undo_if_skipped(self.scaler)
        tau = trained_temperature(self.function.replicated_state())
        if tau is not None:
            return float(tau)
        mean = self.metric_tensors.get("tau")
        if mean is not None:
            return float(mean)
        return self._config.temperature.initial or self._encoder_temperature or CLIP_TEMPERATURE

    def log_normalizers(
        self,
        image_features: Tensor,
        text_features: Tensor,
        index: Tensor | None = None,
        *,
        reference: StoredRows | None = None,
    ) -> Tensor:
        """Return the method's current estimates of log g for the anchors of a batch, without changing any state.

        g_i is the mean of exp((s_ij - s_ii)/tau) over the training set's other samples j; TuneCLIP applies its hinge to
        s_ij - s_ii. OpenCLIP estimates g_i from the batch alone. The similarities of a reference are subtracted from
        s_ij and s_ii. All ranks must call this method, with the same number of rows. Arguments are as in `forward`, but
        they are not checked; the features must be on the device of the loss's state, and `index` in host memory.

        Returns:
            (2, b) estimates for images and texts, -inf where the method has no estimate.

        Raises:
            UserError: the method, such as SigLIP, has no normalizers; the method cannot use a reference model; or the
                options require one and the call lacks its features.
        """
        if index is None:
            index = torch.full((len(image_features),), self._samples, device="cpu")
        log_g, _ = self.estimate_normalizers(image_features, text_features, index, reference=reference)
        return log_g

    @torch.no_grad()
    def estimate_normalizers(
        self,
        image_features: Tensor,
        text_features: Tensor,
        index: Tensor,
        valid: Tensor | None = None,
        *,
        reference: StoredRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the current estimates of log g and the temperatures of a batch's anchors; see `log_normalizers`.

        The features are sent in the dtype of the state, so that rounding adds no error to the estimates.

        Returns:
            Two (2, v) tensors for this rank's v valid rows, with row 0 for image anchors and row 1 for text anchors:
            log of the estimated g (-inf where there is no estimate), and tau.
        """
        function = self.whole_function
        if not isinstance(function, GlobalContrastiveLoss):
            raise UserError(f"{self._name} estimates no normalizers: use another method.")
        problem = self._problem_with_models(StoredBatch.of(reference, None), required=(REFERENCE,))
        if problem is not None:
            raise UserError(problem)
        self._undo_guard.undo_if_skipped(self.scaler)
        valid = all_valid(len(index)) if valid is None else valid
        pending = self._pending_batch(
            index, valid, self._next_position(), comm_dtype=self._dtype, sends_features=True, training=False
        )
        pending.add_text(text_features)
        pending.add_image(image_features)
        if reference is not None:
            pending.add_stored(REFERENCE, *reference)
        pending.begin_reads()
        device_type = image_features.device.type
        with torch.autocast(device_type, enabled=False), products_exact_for(torch.float32):
            return function.log_normalizers(pending.gathered(self._dtype))

    @contextmanager
    def accumulate(self, model: nn.Module | None = None, scale: float | GradScaler | None = None) -> Iterator[TwoPass]:
        """Compute the exact gradient of a batch in micro-batches, using two passes as in GradCache.

        Args:
            model: the encoders, plain or wrapped in DDP or FSDP2. Gradients are reduced over ranks in the last
                micro-batch only (with DDP's static graph, in each one), and running statistics of batch normalization
                change in the second pass only. If you omit the model, gradients are reduced in each micro-batch, and
                both passes change these statistics.
            scale: factor by which all gradients are multiplied, or the `GradScaler` that provides it; by default, the
                loss's `scaler` if it has one, otherwise 1. Pass the scaler rather than the result of its `get_scale()`,
                which does not initialize the scaler.

        Returns:
            A context manager that yields a `TwoPass`; call its methods as in the example.

        Raises:
            RuntimeError: a call of a `TwoPass` method is missing, extra or out of order, or the two passes differ; see
                the methods.

        Example:
            import torch
            from torch.nn.functional import normalize
            from neuclip_ds import ContrastiveLoss


            class Towers(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.image, self.text = torch.nn.Linear(32, 64), torch.nn.Linear(48, 64)

                def forward(self, images, texts):
                    return normalize(self.image(images), dim=1), normalize(self.text(texts), dim=1)


            loss_fn = ContrastiveLoss("fastclip_v3", dim=64, samples=1000, epochs=30, steps_per_epoch=125)
            model = Towers()
            micro_batches = []
            for index in torch.arange(16).split(4):
                micro_batches.append((torch.randn(4, 32), torch.randn(4, 48), index))

            with loss_fn.accumulate(model) as passes:
                for images, texts, index in micro_batches:
                    with passes.features():
                        passes.add(*model(images, texts), index)
                loss = passes.loss()
                for images, texts, _ in micro_batches:
                    with passes.gradients():
                        passes.backward(*model(images, texts))
        """
        if scale is None:
            scale = 1.0 if self.scaler is None else self.scaler
        passes = TwoPass(self, model, scale)
        yield passes
        passes.finish()

    def save(self, folder: Path | str) -> None:
        """Write the state of all ranks to a folder that any number of ranks can `load`. All ranks must call `save`.

        The folder must be in a file system that all ranks share. An interrupted `save` leaves a folder that `load`
        refuses, even if the folder contained an earlier state: save to a new folder each time.

        Raises `UserError` on all ranks if a rank cannot write to the folder.
        """
        self._undo_guard.undo_if_skipped(self.scaler)
        saved_state.write(Path(folder), self.function, self._metadata(), self._communicator)

    def load(self, folder: Path | str) -> None:
        """Read the state that `save` wrote, including `lr`; the number of ranks may differ. All ranks must call `load`.

        If the saved loss and this one were built with different values of `steps_per_epoch`, for example because the
        global batch has changed, the count of training calls is scaled, so that training continues in the same epoch.

        Raises:
            UserError: the folder is incomplete or cannot be read, or was saved with a different `method`, `dim`,
                `samples` or option, except `chunk_size`, `comm_dtype`, `npn.replicas`, `reference_model` and the
                options under `distill`, which may differ.
        """
        files = saved_state.open_folder(Path(folder))
        self._prepare_to_load(files.metadata, str(Path(folder)))
        saved_state.read(files, self.function)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `copy.deepcopy` and `pickle`, without a step in progress.

        A deep copy, such as that of `torch.optim.swa_utils.AveragedModel`, shares the process group and has no scaler.
        """
        self._undo_guard.undo_if_skipped(self.scaler)
        guard = self._undo_guard.without_copies()
        return {**self.__dict__, "scaler": None, "_pending": None, "_undo_guard": guard}

    def get_extra_state(self) -> dict[str, Any]:
        """Return this rank's state, for `state_dict()`."""
        self._undo_guard.undo_if_skipped(self.scaler)
        ranks = self._communicator
        return {
            **self._metadata(),
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            **saved_state.state_of(self.function),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore this rank's state from a `state_dict()` saved by the same rank with the same world size.

        Like `load`, it restores `lr` and scales the count of training calls. Raises `UserError` if the rank, the world
        size, or a setting that `load` compares differs.
        """
        ranks = self._communicator
        if (state["rank"], state["world_size"]) != (ranks.rank, ranks.world_size):
            raise UserError(
                f"The state_dict is from rank {state['rank']} of {state['world_size']}, but this is rank {ranks.rank} "
                f"of {ranks.world_size}. Load on each rank the state_dict that it saved, or use save() and load(), "
                "which allow a different world size."
            )
        self._prepare_to_load(state, "The state_dict")
        saved_state.restore(self.function, state)

    @property
    def _is_training(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _require_valid(
        self,
        dim: int,
        samples: int,
        lr: float,
        steps_per_epoch: int | None,
        epochs: float,
        reduction: str,
        dtype: torch.dtype,
    ) -> None:
        """Raise `UserError` if an argument of the constructor is invalid, or if `steps_per_epoch` is missing."""
        if reduction not in ("ddp_mean", "sum"):
            raise UserError(f"reduction={reduction!r} is unknown: use 'ddp_mean' or 'sum'.")
        lowest = {"dim": 1, "samples": 0, "lr": 0, "steps_per_epoch": 1}
        values = {"dim": dim, "samples": samples, "lr": lr, "steps_per_epoch": steps_per_epoch}
        for name, value in values.items():
            if value is not None and not value >= lowest[name]:
                raise UserError(f"{name}={value} must be at least {lowest[name]}.")
        if not epochs > 0:
            raise UserError(f"epochs={epochs} must be above 0.")
        if dtype not in (torch.float32, torch.float64):
            raise UserError(f"dtype={dtype} is not supported: use torch.float32 or torch.float64.")
        if self._config.needs_epochs and steps_per_epoch is None:
            raise UserError(
                f"{self._name} needs the length of the run and of its epochs: pass epochs and steps_per_epoch."
            )

    def _build(self, communicator: Communicator, dtype: torch.dtype) -> None:
        """Build the loss function with new state."""
        self._communicator = communicator
        self._dtype = dtype
        context = LossContext(
            dim=self._dim,
            samples=self._samples,
            communicator=communicator,
            dtype=dtype,
            temperature=self._encoder_temperature,
            bias=self._encoder_bias,
            adam=self._adam,
            spare_rows=self._spare_rows,
        )
        self.function: LossFunction = build_function(self._builder, self._config, context)

    def _begin(self, index: Tensor, valid: Tensor, training: bool, position: Position | None) -> PendingBatch:
        """Send the indices of a batch; if `training`, and with `undo` or a scaler, prepare to revert state updates."""
        self._undo_guard.undo_if_skipped(self.scaler)
        if training:
            self._undo_guard.begin(self.function, self.scaler)
        if position is None:
            position = self._next_position()
        sends_features = not training or self.function.gathers(position)
        comm_dtype = None if self._config.comm_dtype == "auto" else getattr(torch, self._config.comm_dtype)
        return self._pending_batch(
            index, valid, position, comm_dtype=comm_dtype, sends_features=sends_features, training=training
        )

    def _send(
        self,
        image: Tensor,
        text: Tensor,
        index: Tensor | None,
        valid: Tensor | None,
        training: bool,
        position: Position | None,
        stored: StoredBatch,
    ) -> PendingBatch:
        """Check a batch for which `begin` was not called, and send its indices and all of its features."""
        index = index.cpu() if isinstance(index, Tensor) else index
        valid = valid.cpu() if isinstance(valid, Tensor) else valid
        self._undo_guard.undo_if_skipped(self.scaler)
        rows = self._checked_rows(image, text, index, valid, training, stored)

        if index is None:
            index = torch.full((len(image),), self._samples, device="cpu")
        valid = all_valid(len(image)) if valid is None else valid
        missing = rows - len(image)
        if missing:  # ranks with fewer rows than others add invalid rows
            image = pad(image, (0, 0, 0, missing))
            text = pad(text, (0, 0, 0, missing))
            index = pad(index, (0, missing))
            valid = pad(valid, (0, missing))
            stored = stored.padded(missing)

        pending = self._begin(index, valid, training, position)
        for name, stored_rows in stored:
            pending.add_stored(name, *stored_rows)
        pending.add_text(text)
        pending.add_image(image)
        pending.begin_reads()
        return pending

    def _checked_rows(
        self,
        image: Tensor,
        text: Tensor,
        index: Tensor | None,
        valid: Tensor | None,
        training: bool,
        stored: StoredBatch,
    ) -> int:
        """Check a call's arguments, move the state to the features' device, and return the number of rows to send.

        This is the largest number of rows on any rank; without `validates`, it is this rank's number.

        Raises:
            ValueError: with `validates`, on all ranks, the arguments of any rank cannot be used, or ranks disagree;
                without `validates`, the stored features cannot be used or are missing; or the rank or the world size
                has changed since the first training call.
        """
        if not self.validates:
            self._move_to(image)
            problem = self._problem_with_models(stored)
            if problem is not None:
                raise ValueError(problem)
            return len(image)

        problem = problem_with_features(image, text, self._dim)
        if problem is None:
            self._move_to(image)
            problem = self._problem_with(image, text, index, valid, training, stored)
        else:  # the features' device and dtype are unknown, but the number of ranks may have changed
            self._move(self._communicator.device, self._dtype, keep=True)
        if problem is not None:  # this raises the error on all ranks
            return raise_if_ranks_disagree(0, problem, training, (self._dtype, self._dtype), self._communicator)
        dtypes = image.dtype, text.dtype
        return raise_if_ranks_disagree(len(image), None, training, dtypes, self._communicator, stored.forms())

    def _require_usable(self, pending: PendingBatch, image: Tensor, text: Tensor, training: bool) -> None:
        """Raise `RuntimeError` if a batch that `begin` started does not match the call of the loss."""
        if pending.training != training:
            raise RuntimeError(
                "begin() and the loss were called in different modes: use the same train(), eval() and "
                "torch.no_grad() for both."
            )
        if image.dtype == torch.float64 and self._dtype != torch.float64:
            raise RuntimeError(
                "The features are float64, but begin() has started a batch in float32: build the loss with "
                "dtype=torch.float64."
            )
        for name, features in (("image_features", image), ("text_features", text)):
            if features.shape[1:] != (self._dim,):
                raise RuntimeError(
                    f"{name} has shape {tuple(features.shape)}, but the loss was built with dim={self._dim}: pass "
                    f"features of shape (b, {self._dim})."
                )
        if not len(image) == len(text) == pending.rows:
            raise RuntimeError(
                f"The loss got {len(image)} images and {len(text)} texts, but begin() was called with {pending.rows} "
                "indices: pass one image and one text for each index."
            )

    def _problem_with_models(self, stored: StoredBatch, required: Sequence[str] = (REFERENCE, TEACHER)) -> str | None:
        """Return a message if the loss cannot use the stored features, or if announced ones are missing, or None.

        Only the features in `required` can be missing. The message may also be about a wrong number of teachers.
        """
        given = [name for name, _ in stored]
        for name in given:
            problem = self._unusable(name)
            if problem is not None:
                return problem
        for name in required:
            kind = _STORED_KINDS[name]
            if self._announces(name) and name not in given:
                return f"{kind.option} is set, but a batch lacks the stored features: pass {kind.form}."
        if stored.teachers:
            try:
                self._config.distill.temperatures(len(stored.teachers))
            except UserError as error:
                return str(error)
        return None

    def _announces(self, name: str) -> bool:
        """Return whether the options require these stored features in every batch."""
        if name == REFERENCE:
            return self._config.reference_model is not None
        return self._config.distill.features is not None

    def _unusable(self, name: str) -> str | None:
        """Return a message if the loss cannot use these stored features, or None."""
        if name in self.function.uses_stored:
            return None
        kind = _STORED_KINDS[name]
        if self._config.prefixes:
            return f"`prefixes` cannot be combined with {kind.use}: omit one of these options."
        return f"{self._name} cannot use {kind.use}: {kind.advice}"

    def _problem_with(
        self,
        image: Tensor,
        text: Tensor,
        index: Tensor | None,
        valid: Tensor | None,
        training: bool,
        stored: StoredBatch,
    ) -> str | None:
        """Return a message about the first invalid argument of a call on this rank, or None if all are valid.

        The features have been checked by `problem_with_features`.
        """
        problem = problem_with_rows(index, valid, len(image), self._samples)
        if problem is None:
            skips_steps = self.scaler is not None and self.scaler.is_enabled()
            problem = problem_with_norms(image, text, valid, not_finite=skips_steps)
        needs_index = self.function.needs_index and (training or not self._spare_rows)
        if problem is None and index is None and needs_index:
            problem = f"{self._name} needs the index of each sample: pass index."
        if problem is None:
            problem = self._problem_with_models(stored)
        if problem is None:
            problem = stored.problem(len(image), valid)
        return problem

    def _pending_batch(
        self,
        index: Tensor,
        valid: Tensor,
        position: Position,
        *,
        comm_dtype: torch.dtype | None,
        sends_features: bool,
        training: bool,
    ) -> PendingBatch:
        return PendingBatch(
            index=index.long(),
            valid=valid,
            position=position,
            communicator=self._communicator,
            comm_dtype=comm_dtype,
            begin_reads=self.function.begin_reads if self.function.stores else None,
            sends_features=sends_features,
            training=training,
            uses_stored=self.function.uses_stored,
        )

    def _gradient_of_rows(self, gradient: Tensor, rows: int) -> Tensor:
        """Return the gradient of this rank's first `rows` rows, scaled for the reduction of the encoders' gradients."""
        gradient = gradient[:rows]
        ranks = self._communicator.world_size
        return gradient * ranks if self._averages_gradients and ranks > 1 else gradient

    def _next_position(self) -> Position:
        """Return the position of the next training call, counted from the calls so far."""
        step = self._calls
        length = self._steps_per_epoch
        if not length:
            return Position(step=step, lr=self.lr, peak_lr=self._peak_lr)
        progress = min(step / (self._epochs * length), 1 - 1e-9)
        return Position(step=step, epoch=step // length, progress=progress, lr=self.lr, peak_lr=self._peak_lr)

    def _move_to(self, features: Tensor) -> None:
        """Move the state to the device of the features, and to float64 if they are float64, else to float32."""
        dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
        self._move(features.device, dtype, keep=True)

    def _move(self, device: torch.device, dtype: torch.dtype, keep: bool) -> None:
        """Rebuild the loss if the device, dtype, rank or world size has changed; if `keep`, preserve trained state.

        Raises `ValueError` if trained state cannot be preserved because the rank or the world size has changed.
        """
        before = self._communicator
        ranks = self._given_communicator
        if ranks is None:
            ranks = Communicator(device, before.group)
        same_ranks = (before.rank, before.world_size) == (ranks.rank, ranks.world_size)
        if same_ranks and before.device == ranks.device and self._dtype == dtype:
            return
        keeps_state = keep and self._calls > 0
        if keeps_state and not same_ranks:
            raise ValueError(
                f"The loss was built as rank {before.rank} of {before.world_size}, but this is rank {ranks.rank} of "
                f"{ranks.world_size}: call torch.distributed.init_process_group before you build the loss."
            )
        old = self.function
        with torch.inference_mode(False), torch.no_grad():  # the state must stay trainable after an evaluation
            self._build(ranks, dtype)
        new = self.function

        def copy_state() -> None:
            with torch.inference_mode(False), torch.no_grad():
                saved_state.restore(new, saved_state.state_of(old))

        if keeps_state:
            copy_state()
            self._undo_guard.follow(copy_state)
        else:
            self._undo_guard.forget()

    def _metadata(self) -> dict[str, Any]:
        """Return the metadata that is saved with the state."""
        return {
            "built_with": saved_state.settings_of(self._config, self._dim, self._samples),
            "calls": self._calls,
            "steps_per_epoch": self._steps_per_epoch,
            "lr": float(self.lr),
            "dtype": str(self._dtype).removeprefix("torch."),
        }

    def _prepare_to_load(self, saved: dict[str, Any], where: str) -> None:
        """Adopt a saved state's dtype, position and `lr`; raise `UserError` if its loss had different settings."""
        saved_state.require_equal(self._metadata()["built_with"], saved.get("built_with", {}), where)
        self._move(self._communicator.device, getattr(torch, saved["dtype"]), keep=False)
        self._calls = saved["calls"]
        saved_length = saved.get("steps_per_epoch")  # None also in states of version 0.1
        if saved_length and self._steps_per_epoch and saved_length != self._steps_per_epoch:
            self._calls = self._calls * self._steps_per_epoch // saved_length
            log.info(
                "%s was saved with steps_per_epoch=%d, but this loss has %d: training continues at call %d instead of "
                "%d, in the same epoch",
                where,
                saved_length,
                self._steps_per_epoch,
                self._calls,
                saved["calls"],
            )
        self.lr = saved.get("lr", self.lr)  # states of version 0.1 have no lr
        self.abandon()
        self._undo_guard.forget()


def _config_and_builder(
    method: str | ObjectiveConfig | LossBuilder, options: dict[str, Any]
) -> tuple[ObjectiveConfig, LossBuilder]:
    """Return the options of a loss and the function that builds it.

    Raises `UserError` if the method is unknown, if an option is invalid, or if a config is passed with `options`.
    """
    if isinstance(method, ObjectiveConfig):
        if options:
            raise UserError(f"An ObjectiveConfig already contains all options: set {', '.join(options)} in it.")
        return method, find_method(method.method).build
    if isinstance(method, str):
        config = _validated({"method": method, **options}, f"method {method}")
        return config, find_method(method).build
    return _validated(options, "the loss"), method


def _validated(options: dict[str, Any], name: str) -> ObjectiveConfig:
    try:
        return objective_config().model_validate(options)
    except ValidationError as error:
        problems: list[str] = []
        for problem in error.errors():
            option = ".".join(str(part) for part in problem["loc"])
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                problems.append(f"unknown option {option}")
            else:
                problems.append(f"{option}: {message}" if option else message)
        raise UserError(f"The options of {name} are invalid: {'; '.join(problems)}") from error
