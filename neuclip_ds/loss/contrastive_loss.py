"""`ContrastiveLoss`: an nn.Module that provides every method of this package to other training loops."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import pad

from neuclip_ds.distributed.communicator import Communicator, ProcessGroup
from neuclip_ds.errors import UserError
from neuclip_ds.loss.accumulate import TwoPass
from neuclip_ds.loss.checks import agree_on_call, problem_with
from neuclip_ds.loss.two_pass import with_gradients
from neuclip_ds.objectives.base import Context, Objective, Step
from neuclip_ds.objectives.compose import compose_objective
from neuclip_ds.objectives.contrastive import ContrastiveObjective
from neuclip_ds.objectives.gather import Features
from neuclip_ds.objectives.options import AdamSettings, ObjectiveConfig
from neuclip_ds.objectives.temperature import trained_temperature
from neuclip_ds.state.shards import INDEX, ShardFiles, replicated_shards, shard_files, table_shards

log = logging.getLogger(__name__)

_REPLICATED = "objective"  # kind of the shard with the state that is equal on all ranks


class ContrastiveLoss(nn.Module):
    """Contrastive loss over the global batch of all ranks, with the exact gradient of its method.

    Each training call also updates the temperature and the method's networks with separate optimizers, as the papers'
    algorithms do. The module therefore has no parameters and does not need DDP or FSDP.

    Each call in training mode is one step. Under `eval()` or `torch.no_grad()`, the loss does not update any state, and
    `index` may be None.

    Example:
        ```python
        loss_fn = ContrastiveLoss("neuclip", dim=512, samples=len(dataset), epochs=30, steps_per_epoch=500)
        loss = loss_fn(image_features, text_features, index)
        loss.backward()
        ```

    Attributes:
        lr: current learning rate of the encoders; the temperature's learning rate follows it by default. Set `lr` after
            each scheduler step: `loss_fn.lr = scheduler.get_last_lr()[0]`.
        scaler: the training loop's `torch.amp.GradScaler`, if any. With a scaler, the loss reverts the state updates of
            a call whose step the scaler skipped, and accepts features that are not finite.
        validates: whether calls check their arguments.
        metrics: metrics of the last call, keyed by name, such as `tau` and `batch_loss` (InfoNCE over the same batch).
    """

    def __init__(
        self,
        method: str = "neuclip",
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
        scaler: GradScaler | None = None,
        validate: bool = True,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        """
        Args:
            method: name of a loss, such as `openclip` or `fastclip_v3`.
            dim: width d of the features.
            samples: size n of the training set, required by methods that keep statistics per sample and by
                `temperature={"rule": "learned"}`.
            epochs: length of the run in epochs, for schedules.
            steps_per_epoch: training calls per epoch, for schedules.
            lr: peak learning rate of the encoders.
            betas: Adam betas for the temperature.
            adam_eps: Adam epsilon for the temperature.
            reduction: `ddp_mean` if the encoders' gradients are averaged over ranks (DDP, FSDP, DeepSpeed): the loss
                then multiplies the feature gradients by the world size to compensate. `sum` if they are summed.
            group: process group of the global batch; by default all ranks, or this process if it runs alone.
            scaler: see the `scaler` attribute.
            validate: whether to check the arguments of each call on all ranks. This costs one small collective and, on
                a GPU, one host synchronization. Without validation, all ranks must pass the same number of rows.
            device: device of the state until the first call moves the state to the features' device.
            options: options of the method, as under `objective:` in a recipe, such as `temperature={"rho": 6.5}` or
                `npn={"lr": 0.05}`.

        Raises:
            UserError: the method or an option is unknown, or a value is missing or out of range.
        """
        super().__init__()
        try:
            self._config = ObjectiveConfig.model_validate({"method": method, **options})
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
            raise UserError(f"Options of method {method}: {problems}") from error
        if reduction not in ("ddp_mean", "sum"):
            raise UserError(f"reduction={reduction!r} is unknown: use 'ddp_mean' or 'sum'.")
        least = {"dim": (dim, 1), "samples": (samples, 0), "lr": (lr, 0), "steps_per_epoch": (steps_per_epoch, 1)}
        for name, (value, lowest) in least.items():
            if value is not None and not value >= lowest:
                raise UserError(f"{name}={value} must be at least {lowest}.")
        if not epochs > 0:
            raise UserError(f"epochs={epochs} must be above 0.")
        self._dim, self._samples, self._epochs, self._steps_per_epoch = dim, samples, epochs, steps_per_epoch
        self.lr = self._peak_lr = lr
        self._adam = AdamSettings(betas, adam_eps)
        self._averages, self._group = reduction == "ddp_mean", group
        self.validates, self.scaler = validate, scaler
        self._undo: tuple[Callable[[], None], float] | None = None  # reverts the last call; the scale at that time
        self._warned = False
        self._calls = 0  # training calls so far
        self._metrics: dict[str, Tensor] = {}
        if self._config.needs_epochs and steps_per_epoch is None:
            raise UserError(f"Schedules of method {method} follow epochs: pass epochs and steps_per_epoch.")
        self._build(Communicator(device, group), torch.float32)
        if self._objective.needs_index and not samples:
            raise UserError(f"{method} keeps state of each sample: pass the size of the training set, samples=...")

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        index: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the global batch, the same on all ranks.

        Args:
            image_features: (b, d) normalized rows of any floating dtype; b may differ between ranks.
            text_features: (b, d) normalized rows.
            index: (b,) positions of the samples in the training set, in [0, samples), needed by methods that keep
                statistics per sample. If an index is repeated, the statistics of its last row are stored. Keep `index`
                in host memory; otherwise, the host has to wait for a copy from the GPU.
            valid: (b,) bool in host memory, False for rows to ignore.

        Raises:
            ValueError: on all ranks, if any rank's arguments are invalid or ranks differ in training mode or dtype.
            UserError: fewer than two rows of the global batch are valid.
            RuntimeError: activation checkpointing repeats the call, which would update the loss's state twice.
        """
        learns = self.training and torch.is_grad_enabled()
        if learns and torch._C._current_graph_task_id() >= 0:  # in a backward pass; no public function reports this
            raise RuntimeError("A backward pass repeats the loss: keep it out of activation checkpointing.")
        inputs = (image_features, text_features)
        index, valid = (x.cpu() if isinstance(x, Tensor) else x for x in (index, valid))
        device = image_features.device.type
        autocast = torch.is_autocast_enabled(device)
        with torch.no_grad(), torch.autocast(device, enabled=False) if autocast else nullcontext():
            self._settle()
            rows, given, comm_dtype = len(image_features), image_features.dtype, self._config.comm_dtype
            self._move(image_features.device, given if given == torch.float64 else torch.float32, keep=True)
            self._objective.comm_dtype = given if comm_dtype == "auto" else getattr(torch, comm_dtype)
            if self.validates:
                problem = problem_with(*inputs, index, valid, self._dim, self._samples, self.scaler is not None)
                if index is None and learns and self._objective.needs_index:
                    problem = problem or f"index is missing: {self._config.method} keeps state of each sample."
                rows = agree_on_call(rows, problem, learns, given, self._communicator)
            features = self._padded(image_features, text_features, index, valid, rows)
            if learns and self.scaler is not None:
                self._undo = self._objective.restore_point(), self.scaler.get_scale()
            result = self._objective(features, self._step(learns))
            factor = self._communicator.world_size if self._averages else 1
            gradients = [gradient[: len(image_features)] for gradient in (result.image, result.text)]
            gradients = gradients if factor == 1 else [gradient * factor for gradient in gradients]
            self._metrics = result.metrics
            self._calls += learns
        loss = with_gradients(result.loss, inputs, gradients)
        if learns and not loss.requires_grad and not self._warned:
            self._warned = True
            log.warning(
                "The loss learns from features that need no gradient. If this is an evaluation, call eval() or use "
                "torch.no_grad(); if it is training, do not detach the features."
            )
        return loss

    @property
    def metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._metrics.items()}

    @property
    def temperature(self) -> float:
        """Current temperature tau; with individual temperatures, their mean over the last batch."""
        tau = trained_temperature(self._objective.replicated_state())
        return float(self._metrics.get("tau", self._config.temperature.initial or 0.07) if tau is None else tau)

    def log_normalizers(self, image_features: Tensor, text_features: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the method's current estimates of log g for the anchors of a batch, without changing any state.

        g_i is the mean of exp((s_ij - s_ii)/tau) over the training set's other samples j; OpenCLIP estimates g_i from
        the batch alone. All ranks must call this method, with the same number of rows. Arguments are as in `forward`.

        Returns:
            (2, b) estimates for images and texts, -inf where the method has no estimate yet.

        Raises:
            UserError: the method is SigLIP, whose loss has no normalizer.
        """
        if not isinstance(self._objective, ContrastiveObjective):
            raise UserError(f"{self._config.method} has no normalizer.")
        features = self._padded(image_features, text_features, index, None, len(image_features))
        return self._objective.log_normalizers(features)[0]

    @contextmanager
    def accumulate(self, model: nn.Module | None = None, scale: float = 1.0) -> Iterator[TwoPass]:
        """Compute the exact gradient of a batch in micro-batches, using two passes as in GradCache.

        Args:
            model: the encoders, plain or wrapped in DDP or FSDP2. Gradients are reduced over ranks in the last
                micro-batch only, and running statistics of batch normalization change in the second pass only.
            scale: factor by which all gradients are multiplied, such as the scale of a `GradScaler`.

        Example:
            ```python
            with loss_fn.accumulate(model) as passes:
                for images, texts, index in micro_batches:
                    with passes.features():
                        passes.add(*model(images, texts), index)
                loss = passes.loss()
                for images, texts, _ in micro_batches:
                    with passes.gradients():
                        passes.backward(*model(images, texts))
            ```
        """
        passes = TwoPass(self, model, scale)
        yield passes
        passes.finish()

    def save(self, folder: Path | str) -> None:
        """Write the state of all ranks to a folder that any number of ranks can `load`. All ranks must call `save`."""
        self._settle()
        folder = Path(folder)
        self._communicator.on_rank_zero(lambda: folder.mkdir(parents=True, exist_ok=True))
        shards = table_shards(self._objective.row_tables())
        if self._communicator.rank == 0:
            shards |= replicated_shards(_REPLICATED, self._objective.replicated_state())
        for file in shard_files(shards, self._facts(), self._communicator):
            file.write(folder)
        self._communicator.barrier()

    def load(self, folder: Path | str) -> None:
        """Read the state that `save` wrote; the number of ranks may differ.

        Raises:
            UserError: the folder is incomplete, or was saved with a different `method`, `dim`, `samples` or option.
        """
        folder = Path(folder)
        if not (folder / INDEX).is_file():
            raise UserError(f"{folder} does not contain a saved loss: {INDEX} is missing.")
        files = ShardFiles(folder)
        self._prepare_for(files.facts, str(folder))
        files.fill(self._objective.row_tables())
        self._objective.load_replicated_state(files.replicated(_REPLICATED))

    def get_extra_state(self) -> dict[str, Any]:
        """Return this rank's state, for `state_dict()`."""
        self._settle()
        place = {"rank": self._communicator.rank, "world_size": self._communicator.world_size}
        return {**self._facts(), **place, **_state_of(self._objective)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore this rank's state from a `state_dict()` saved by the same rank with the same world size."""
        self._prepare_for(state, "The state_dict")
        ranks = self._communicator
        if (state["rank"], state["world_size"]) != (ranks.rank, ranks.world_size):
            raise UserError(
                f"The state_dict is from rank {state['rank']} of {state['world_size']}, but this is rank {ranks.rank} "
                f"of {ranks.world_size}. Use save() and load() for another world size."
            )
        _fill(self._objective, state)

    def _build(self, communicator: Communicator, dtype: torch.dtype) -> None:
        self._communicator, self._dtype = communicator, dtype
        # the spare row is for samples that are not in the training set
        context = Context(self._dim, self._samples, communicator, dtype, adam=self._adam, spare_rows=1)
        self._objective: Objective = compose_objective(self._config, context)

    def _move(self, device: torch.device, dtype: torch.dtype, keep: bool) -> None:
        """Rebuild the objective if the device, dtype, rank or world size has changed; if `keep`, preserve the state."""
        before, was, ranks = self._objective, self._communicator, Communicator(device, self._group)
        same_ranks = (was.rank, was.world_size) == (ranks.rank, ranks.world_size)
        if same_ranks and (was.device, self._dtype) == (device, dtype):
            return
        keeps = keep and self._calls > 0
        if keeps and not same_ranks:
            raise ValueError(
                f"The loss was built as rank {was.rank} of {was.world_size}, but this is rank {ranks.rank} of "
                f"{ranks.world_size}: build it after the process group."
            )
        with torch.inference_mode(False), torch.no_grad():  # the state must stay trainable after an evaluation
            self._build(ranks, dtype)
            if keeps:
                _fill(self._objective, _state_of(before))

    def _facts(self) -> dict[str, Any]:
        """Return the metadata that is saved with the state."""
        built = {"dim": self._dim, "samples": self._samples}
        options = self._config.model_dump(
            mode="json", exclude={"chunk_size": True, "comm_dtype": True, "npn": {"replicas": True}}
        )
        for key, value in options.items():
            built |= {f"{key}.{name}": x for name, x in value.items()} if isinstance(value, dict) else {key: value}
        return {"built_with": built, "calls": self._calls, "dtype": str(self._dtype).removeprefix("torch.")}

    def _prepare_for(self, saved: dict[str, Any], where: str) -> None:
        """Adopt a saved state's dtype and call count; raise `UserError` if its loss had different settings."""
        own, given = self._facts()["built_with"], saved.get("built_with", {})
        for key in sorted(own, key="method".__ne__):  # compare the method first
            if given.get(key) != own[key]:
                raise UserError(
                    f"{where} was saved with {key}={given.get(key)}, but this loss was built with {key}={own[key]}; "
                    "build it as the saved one, or train a new one."
                )
        self._move(self._communicator.device, getattr(torch, saved["dtype"]), keep=False)
        self._calls, self._undo = saved["calls"], None

    def _settle(self) -> None:
        """Revert the last call's updates if the scaler skipped its step, that is, if the scale has since dropped."""
        undo, self._undo = self._undo, None
        if undo is not None and self.scaler is not None and self.scaler.get_scale() < undo[1]:
            undo[0]()

    def _padded(self, image: Tensor, text: Tensor, index: Tensor | None, valid: Tensor | None, rows: int) -> Features:
        """Pad this rank's features to `rows` rows; the added rows are invalid."""
        count, more = len(image), rows - len(image)
        index = torch.full((count,), self._samples) if index is None else index.long()
        valid = torch.ones(count, dtype=torch.bool) if valid is None else valid
        image, text = image.detach().to(self._dtype), text.detach().to(self._dtype)
        if more:
            image, text = (pad(x, (0, 0, 0, more)) for x in (image, text))
            index, valid = pad(index, (0, more)), pad(valid, (0, more))
        return Features(image, text, index, valid)

    def _step(self, learns: bool) -> Step:
        number, length = self._calls, self._steps_per_epoch
        epoch, progress = (number // length, min(number / (self._epochs * length), 1 - 1e-9)) if length else (0, 0.0)
        return Step(number, epoch, self.lr, self._peak_lr, progress, learns)


def _state_of(objective: Objective) -> dict[str, Any]:
    tables = {name: dict(table.tensors) for name, table in objective.row_tables().items()}
    return {"replicated": objective.replicated_state(), "tables": tables}


def _fill(objective: Objective, state: dict[str, Any]) -> None:
    objective.load_replicated_state({name: value.clone() for name, value in state["replicated"].items()})
    for name, table in objective.row_tables().items():
        for key, tensor in table.tensors.items():
            tensor.copy_(state["tables"][name][key])
