"""Imports what tests' processes need; the fork server loads this module once, and its forks have it all at once."""

import contextlib
import gc
import importlib
import pkgutil

import neuclip_ds

for module in pkgutil.walk_packages(neuclip_ds.__path__, "neuclip_ds."):
    if not module.name.endswith("__main__"):
        with contextlib.suppress(ImportError):  # an optional library
            importlib.import_module(module.name)
for name in ("pytest", "hypothesis", "webdataset", "torch.utils.tensorboard", "transformers"):
    importlib.import_module(name)
gc.collect()
gc.freeze()  # so that collections in the forks do not touch, hence copy, the pages that they share
