"""tools/time_tests.py covers all tests."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
from time_tests import AREAS, TESTS, timed


def test_every_test_belongs_to_one_area() -> None:
    areas = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    folders = {area for area in areas if not area.endswith(".py")} - {"gpu"}  # those need a GPU
    assert folders == {area for area in AREAS if area != "test_*.py"}


@pytest.mark.slow
def test_the_tests_of_a_folder_are_timed() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        area = pool.submit(timed, "state").result()
    assert area.fast > 0
    assert area.cpu_seconds > 1  # importing torch alone takes longer
