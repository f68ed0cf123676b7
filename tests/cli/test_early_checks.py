"""Paths that cannot exist are refused in one line before torch is imported."""

import pytest

from neuclip_ds.cli.early_checks import check_model, check_path, check_run
from neuclip_ds.errors import UserError
from neuclip_ds.recipe import parse

IMPOSSIBLE = ["~nosuchuser/x", "x" * 256, "x/" * 3000, "/" + "\u00e9" * 130]


@pytest.mark.parametrize("path", IMPOSSIBLE)
def test_paths_that_no_file_can_have_do_not_exist(path: str) -> None:
    for check in (check_path, check_model):
        with pytest.raises(UserError, match="does not exist"):
            check("--data", path)


@pytest.mark.parametrize("path", IMPOSSIBLE)
@pytest.mark.parametrize(
    "option", ["data.train", "data.zero_shot", "data.evaluation_sets", "objective.reference_model"]
)
def test_a_run_with_such_a_path_is_refused(option: str, path: str) -> None:
    with pytest.raises(UserError, match=option):
        check_run(parse(["demo", f"--{option}={path}"]).config)
