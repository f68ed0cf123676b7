"""Register losses that are not in this package, and import plugins, which are modules that call `register_loss`.

Importing this module does not import torch, because plugins are imported before the command line is read.
"""

import importlib.util
import keyword
import sys
import traceback
from pathlib import Path

from pydantic import ValidationError

from neuclip_ds.errors import UserError
from neuclip_ds.losses.method import LossBuilder, Method
from neuclip_ds.losses.methods import METHODS, REGISTERED_OPTIONS
from neuclip_ds.losses.options import ObjectiveConfig
from neuclip_ds.section import Section


def register_loss(name: str, builder: LossBuilder, options: type[Section] | None = None) -> None:
    """Add a loss that is not in this package, so that `objective.method=NAME` selects it.

    A second call with the same name replaces the loss.

    Args:
        name: name of the method and of its section of options, `objective.NAME`.
        builder: function that builds the loss from the run's `ObjectiveConfig` and a `LossContext`. For a function of
            gathered features, use `neuclip_ds.autograd_loss`.
        options: subclass of `neuclip_ds.Section` with the loss's options; the builder reads them as `config.NAME`.

    Raises:
        UserError: the name is not a Python identifier that begins with a letter, is a Python keyword, or is already the
            name of one of the package's methods or of an option or attribute of `ObjectiveConfig`; `builder` is not
            callable; or `options` is not a subclass of `Section` or contains an option without a valid default.

    Example:
        import neuclip_ds


        def mean_distance(image, text, index):
            return (image - text).square().sum(dim=1).mean()


        neuclip_ds.register_loss("distance", neuclip_ds.autograd_loss(mean_distance))
        loss_fn = neuclip_ds.ContrastiveLoss("distance", dim=64)  # or objective.method=distance in a run
    """
    if not callable(builder):
        raise UserError(f"register_loss: the builder of {name} is a {type(builder).__name__}, but must be a function.")
    if options is not None and not (isinstance(options, type) and issubclass(options, Section)):
        raise UserError(f"register_loss: the options of {name} must be a subclass of neuclip_ds.Section.")
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise UserError(
            f"register_loss: {name!r} cannot name a loss; use letters, digits and _, begin with a letter, and "
            "do not use a Python keyword."
        )
    is_registered = name in METHODS and not isinstance(METHODS[name].builder, str)
    is_attribute = name in ObjectiveConfig.model_fields or hasattr(ObjectiveConfig, name)
    if is_attribute or (name in METHODS and not is_registered):
        raise UserError(
            f"register_loss: {name} is already the name of a method, or of an option or attribute of ObjectiveConfig; "
            "choose another name."
        )
    if options is None:
        REGISTERED_OPTIONS.pop(name, None)
        METHODS[name] = Method(builder=builder, estimates_normalizers=False)
        return
    try:
        options()
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, problem['loc'])) or name}: {problem['msg']}" for problem in error.errors()]
        raise UserError(
            f"register_loss: every option of {name} needs a valid default ({'; '.join(problems)})."
        ) from error
    REGISTERED_OPTIONS[name] = options
    METHODS[name] = Method(builder=builder, sections=(name,), estimates_normalizers=False)


def import_plugin(name: str) -> None:
    """Import a plugin, once per process.

    Args:
        name: name of a module on Python's path, or path of a .py file.

    Raises:
        UserError: the plugin does not exist or raises an exception.
    """
    try:
        if name.endswith(".py"):
            _import_file(Path(name).expanduser().resolve())
        else:
            importlib.import_module(name)
    except Exception as error:  # a plugin may raise any exception
        reason = " ".join(str(error).split())[:300].rstrip(".") or "no message"
        raise UserError(
            f"The plugin {name} cannot be imported: {type(error).__name__}: {reason}{_location(error)}. Correct it, or "
            "set --plugin or run.plugins to another module or .py file."
        ) from error


def _import_file(path: Path) -> None:
    """Import a file as a module whose name is the file's path, which no other module can have."""
    name = str(path)
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the name ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up the module of a class to resolve its annotations
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _location(error: Exception) -> str:
    """Return the file and line that raised an error, or "" if the error is from the import itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_from_import = frame.filename == __file__ or frame.filename.startswith("<")
    return "" if is_from_import else f" ({frame.filename}, line {frame.lineno})"
