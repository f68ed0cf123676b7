"""Import the modules that test processes need; the fork server loads this module once for all of its forks."""

import contextlib
import gc
import importlib
import pkgutil

import deepspeed

import neuclip_ds

for module in pkgutil.walk_packages(neuclip_ds.__path__, "neuclip_ds."):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # an optional library that is not installed
            importlib.import_module(module.name)
for name in ("pytest", "hypothesis", "webdataset", "torch.utils.tensorboard", "transformers"):
    importlib.import_module(name)
for name in ("accelerate", "lightning", "open_clip", "transformers.trainer"):  # for the tests of other training loops
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
# modules that DeepSpeed loads when an engine starts, one of which imports torch's compiler, and the list of operators
for name in ("zero.muon.muon_optimizer", "superoffload.superoffload_stage3"):
    importlib.import_module(f"deepspeed.runtime.{name}")
importlib.import_module("deepspeed.module_inject.auto_ep_layer")
deepspeed.ops.__compatible_ops__  # noqa: B018
gc.collect()
gc.freeze()  # keeps garbage collection in the forks from writing to, and so copying, shared memory pages
